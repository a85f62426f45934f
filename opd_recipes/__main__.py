from opd_recipes.main import main

main()
