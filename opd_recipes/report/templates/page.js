"use strict";
(() => {
  document.documentElement.classList.add("js");
  const $ = (selector, root = document) => root.querySelector(selector);
  const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];
  const data = JSON.parse($("#data").textContent);

  function make(tag, text, parent) {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (parent) parent.append(element);
    return element;
  }

  // Charts: the table holds the values, so the cursor reads them from there.
  for (const chart of $$(".chart")) {
    const svg = $("svg", chart), scrub = $(".scrub", chart), cursor = $(".cursor", chart);
    const places = chart.dataset.places.split(" ").map(Number);
    const rows = $$("tbody tr", chart), names = $$("thead th", chart).slice(1).map((cell) => cell.textContent);
    const values = $$(".values b", chart), step = $(".values .step", chart);

    function read(index) {
      const cells = [...rows[index].cells].map((cell) => cell.textContent || "none");
      cursor.setAttribute("transform", `translate(${places[index]} 0)`);
      chart.classList.add("reading");
      scrub.value = index;
      step.textContent = `step ${cells[0]}`;
      values.forEach((value, i) => { value.textContent = cells[i + 1]; });
      const said = names.map((name, i) => `${name} ${cells[i + 1]}`).join(", ");
      scrub.setAttribute("aria-valuetext", `step ${cells[0]}: ${said}`);
    }

    read(rows.length - 1);
    chart.classList.remove("reading");
    scrub.addEventListener("input", () => read(Number(scrub.value)));
    scrub.addEventListener("focus", () => read(Number(scrub.value)));
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
      let nearest = 0;
      places.forEach((place, i) => { if (Math.abs(place - x) < Math.abs(places[nearest] - x)) nearest = i; });
      read(nearest);
    });
  }

  // Rollouts: one at a time.
  const browser = $("#browser"), list = $("#list");
  if (list) {
    const all = $$(".rollout", list), filter = $("#filter"), place = $("#place");
    const fits = {
      all: () => true,
      changed: (rollout) => rollout.dataset.changed === "1",
      right: (rollout) => rollout.dataset.right === "1",
      wrong: (rollout) => rollout.dataset.right === "0",
    };
    let chosen = all, current = 0;

    function show(index, focus) {
      current = Math.max(0, Math.min(index, chosen.length - 1));
      const rollout = chosen[current];
      all.forEach((one) => { one.hidden = one !== rollout; });
      $("#none-left").hidden = chosen.length > 0;
      $("#previous").disabled = current <= 0;
      $("#next").disabled = current >= chosen.length - 1;
      place.textContent = rollout ? `${current + 1} of ${chosen.length}` : "0 of 0";
      if (!rollout) return;
      if (!$("[aria-selected=true]", rollout)) choose(hottest(rollout), false);
      if (focus) rollout.focus();
    }

    // The address names the rollout, so that a page that loads itself again, or a link, shows the same one.
    function go(index, focus) {
      show(index, focus);
      try {
        if (chosen.length) history.replaceState(null, "", `#${chosen[current].id}`);
      } catch { /* a sandboxed frame: nothing depends on it */ }
    }

    function pick() {
      chosen = all.filter(fits[filter.value]);
      go(0, false);
    }

    function hottest(rollout) {
      const last = $$(".tokens", rollout).pop();
      const tokens = last ? $$(".t", last) : [];
      return tokens.reduce((best, one) => (Number(one.dataset.d) > Number(best.dataset.d) ? one : best), tokens[0]);
    }

    function choose(token, focus) {
      if (!token) return;
      const rollout = token.closest(".rollout");
      $$(".t[aria-selected=true]", rollout).forEach((one) => one.setAttribute("aria-selected", "false"));
      token.setAttribute("aria-selected", "true");
      token.setAttribute("aria-describedby", $(".detail", rollout).id);
      // One stop of the Tab key for each response.
      for (const response of $$(".tokens", rollout)) {
        const stop = response.contains(token) ? token : $(".t[tabindex='0']", response) || $(".t", response);
        $$(".t[tabindex='0']", response).forEach((one) => { one.tabIndex = -1; });
        stop.tabIndex = 0;
      }
      detail(rollout, token);
      if (focus) token.focus();
    }

    function detail(rollout, token) {
      const response = token.parentElement, index = $$(".t", response).indexOf(token);
      const facts = data.tokens[all.indexOf(rollout)][Number(response.dataset.which)][index];
      const panel = $(".detail", rollout);
      panel.replaceChildren();
      const step = $("h4", response.parentElement).firstChild.textContent.trim();
      make("h4", `Token ${index + 1}: ${token.textContent} (${step})`, panel);
      const numbers = [["divergence", "nats"], ["weight", ""], ["entropy", "nats"], ["student", ""], ["teacher", ""], ["id", ""]]
        .filter(([key]) => facts[key] !== null)
        .map(([key, unit]) => `${{ student: "student's probability", teacher: "teacher's probability" }[key] || key} ${facts[key]}${unit && " " + unit}`);
      make("p", numbers.join(" · "), panel);
      const tables = make("div", undefined, panel);
      tables.className = "tables";
      table(tables, "Student's likeliest tokens", facts.students);
      table(tables, "Teacher's likeliest tokens", facts.teachers);
    }

    function table(parent, caption, rows) {
      if (!rows.length) return;
      const element = make("table", undefined, parent);
      make("caption", caption, element);
      const head = element.createTHead().insertRow();
      for (const name of ["token", "probability"]) make("th", name, head).scope = "col";
      const body = element.createTBody();
      for (const [text, probability] of rows) {
        const row = body.insertRow();
        make("th", text, row).scope = "row";
        const cell = make("td", `${(100 * probability).toFixed(1)}%`, row);
        const fill = make("span", undefined, cell);
        fill.className = "fill";
        fill.style.width = `${100 * Math.min(1, Math.max(0, probability))}%`;
      }
    }

    const moves = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity };
    browser.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.altKey || event.metaKey) return;
      const token = event.target.closest(".tokens .t");
      if (token && event.key in moves) {
        const tokens = $$(".t", token.parentElement);
        const index = Math.max(0, Math.min(tokens.indexOf(token) + moves[event.key], tokens.length - 1));
        choose(tokens[index], true);
        event.preventDefault();
      } else if (event.target !== filter && "jJkK".includes(event.key) && event.key) {
        go(current + (event.key.toLowerCase() === "j" ? 1 : -1), true);
        event.preventDefault();
      }
    });
    list.addEventListener("pointerover", (event) => {
      const token = event.target.closest(".tokens .t");
      if (token) choose(token, false);
    });
    list.addEventListener("click", (event) => {
      const token = event.target.closest(".tokens .t");
      if (token) choose(token, true);
    });
    filter.addEventListener("change", pick);
    $("#previous").addEventListener("click", () => go(current - 1, false));
    $("#next").addEventListener("click", () => go(current + 1, false));
    $("#numbers-on").addEventListener("change", (event) => list.classList.toggle("numbered", event.target.checked));
    show(Math.max(0, all.findIndex((one) => `#${one.id}` === location.hash)), false);
  }

  // A page of a run that goes on loads itself again, unless somebody is reading in it.
  const seconds = Number(document.body.dataset.refresh);
  if (seconds) {
    const pause = $("#pause");
    pause.addEventListener("click", () => {
      pause.setAttribute("aria-pressed", String(pause.getAttribute("aria-pressed") !== "true"));
    });
    setInterval(() => {
      const reading = document.activeElement && document.activeElement.closest("main") && document.activeElement.id !== "main";
      if (!reading && pause.getAttribute("aria-pressed") === "false") location.reload();
    }, 1000 * seconds);
  }
})();
