"""``python -m data_prep synthesize``: questions about details of unlabelled images, from any OpenAI-compatible server.

Images in a folder become rows (image, question, evidence box, answer) by the published pipeline of Vision-OPD (arXiv
2605.18740): list objects, box each, ask about each, validate, answer eight times, keep what agrees. Every finished call is in
``ledger.jsonl``: a run that was killed is started again with the same command and pays for nothing twice. One process drives
the servers, which do the work; it needs no Ray.
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec

from data_prep.synthesize.options import add_arguments

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> None:
    if find_spec("httpx") is None:
        sys.exit("data_prep: synthesize needs httpx to talk to the server; pip install httpx")
    from data_prep.rows import DataError
    from data_prep.synthesize.driver import synthesize

    try:
        report = synthesize(args)
    except DataError as error:
        sys.exit(f"data_prep: {error}")
    except OSError as error:
        sys.exit(f"data_prep: {error}; finished calls are kept in {args.out}: mend it and run the same command again")
    except KeyboardInterrupt:
        sys.exit(f"data_prep: stopped; finished calls are kept in {args.out}: run the same command again to go on")
    if not report["complete"]:
        sys.exit(
            f"data_prep: {sum(row['unfinished'] for row in report['stages'].values())} items are unfinished because calls were "
            f"given up, e.g. {report['unfinished'][0]}; the rows above are sound, run the same command again for the others"
        )
