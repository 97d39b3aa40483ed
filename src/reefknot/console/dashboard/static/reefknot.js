// Live fragments, actions with their confirmation, sorting, selections, values of charts, theme and times, keyboard
// shortcuts. Every page reads fine without this script.
"use strict";

// What this browser remembers for this origin. The theme is set before anything is drawn.
const stored = (name) => { try { return localStorage.getItem(name) || ""; } catch { return ""; } };
const store = (name, value) => { try { localStorage.setItem(name, value); } catch { /* it lasts for this page */ } };
const setTheme = () => {
  const theme = stored("reefknot-theme");
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
};
setTheme();
document.documentElement.classList.add("script");

addEventListener("DOMContentLoaded", () => {
  const one = (choice, within = document) => within.querySelector(choice);
  const all = (choice, within = document) => Array.from(within.querySelectorAll(choice));

  // ---- requests: a cookie goes to every port of this host, the key only where this script sends it -------------------------

  const KEY = "reefknot-key";

  function ask(url, options = {}) {
    const key = stored(KEY);
    const headers = { ...options.headers, ...(key ? { "X-Reefknot-Key": key } : {}) };
    return fetch(url, { ...options, credentials: "same-origin", headers });
  }

  // ---- times: relative ones grow older between two updates -----------------------------------------------------------

  const ago = (seconds) => {
    const future = seconds < 0;
    const s = Math.abs(seconds);
    const words = s < 1.5 ? "now" : s < 90 ? `${Math.round(s)} s` : s < 5400 ? `${Math.round(s / 60)} min`
      : s < 129600 ? `${Math.round(s / 3600)} h` : `${Math.round(s / 86400)} d`;
    return words === "now" ? words : future ? `in ${words}` : `${words} ago`;
  };
  // The Swedish form of a time is that of ISO 8601.
  const clocks = Object.fromEntries(["local", "UTC"].map((zone) => [zone, new Intl.DateTimeFormat("sv-SE", {
    dateStyle: "short", timeStyle: "medium", timeZone: zone === "UTC" ? "UTC" : undefined })]));
  const zoneName = (zone) => (zone === "UTC" ? "UTC" : Intl.DateTimeFormat().resolvedOptions().timeZone || "local time");
  const put = (node, words) => { if (node.textContent !== words) node.textContent = words; };
  const tick = () => {
    const zone = stored("reefknot-times");
    for (const time of all("time[data-relative], time[data-absolute]")) {
      const at = Date.parse(time.dateTime);
      if (Number.isNaN(at)) continue;
      const relative = ago((Date.now() - at) / 1000);
      if (zone in clocks) {
        put(time, clocks[zone].format(at));
        time.title = `${relative}, ${zoneName(zone)}`;
      } else if (time.dataset.relative !== undefined) {
        put(time, relative);
        time.title = `${clocks.UTC.format(at)} UTC`;
      }
    }
  };

  // ---- live: new fragments go into the old ones, so that focus, scroll and open details stay ----------------------------

  const keyOf = (node) => (node.nodeType === 1 ? node.id || node.getAttribute("data-key") : null);

  function takeAttributes(from, to) {
    const keeps = (name) => (from.nodeName === "DETAILS" && name === "open") || (from.nodeName === "INPUT" && name === "checked")
      || (from.nodeName === "TH" && name === "aria-sort") || (name === "disabled" && from.classList.contains("sort"))
      || (name === "hidden" && from.dataset.picked !== undefined);
    for (const { name } of Array.from(from.attributes)) if (!to.hasAttribute(name) && !keeps(name)) from.removeAttribute(name);
    for (const { name, value } of to.attributes) {
      if (from.getAttribute(name) !== value && !keeps(name)) from.setAttribute(name, value);
    }
  }

  function morph(from, to) {
    if (from.isEqualNode(to)) return;
    if (from.nodeType !== 1) { from.data = to.data; return; }
    takeAttributes(from, to);
    if (from.nodeName === "TEXTAREA") return;
    const keyed = new Map(Array.from(from.children).filter(keyOf).map((child) => [keyOf(child), child]));
    let current = from.firstChild;
    for (const wanted of Array.from(to.childNodes)) {
      const key = keyOf(wanted);
      const match = key ? keyed.get(key) : null;
      if (match && match.nodeName === wanted.nodeName) {
        if (match === current) current = current.nextSibling;
        else from.insertBefore(match, current);
        morph(match, wanted);
      } else if (!key && current && !keyOf(current) && current.nodeName === wanted.nodeName) {
        const next = current.nextSibling;
        morph(current, wanted);
        current = next;
      } else {
        from.insertBefore(document.importNode(wanted, true), current);
      }
    }
    while (current) {
      const next = current.nextSibling;
      current.remove();
      current = next;
    }
  }

  const isTypedIn = (region) => {
    const active = document.activeElement;
    const selection = document.getSelection();
    return (region.contains(active) && /^(INPUT|TEXTAREA|SELECT)$/.test(active.nodeName) && active.type !== "checkbox")
      || (selection && !selection.isCollapsed && region.contains(selection.anchorNode));
  };

  function take(html) {
    const fresh = new DOMParser().parseFromString(html, "text/html");
    const focused = document.activeElement;
    const place = placeOf(focused);
    for (const region of all("[data-live]")) {
      const wanted = one(`[data-live="${region.dataset.live}"]`, fresh);
      if (wanted && !isTypedIn(region)) morph(region, wanted);
    }
    if (!focused.isConnected) focusNear(place);
    dress();
  }

  // What the script adds to what the server has drawn.
  function dress() {
    tick();
    sortTables();
    showPicked();
    pointAgain();
  }

  // ---- sorting: the rows that are on the page, by the column whose name is pressed; a third press is the list's own order --

  const order = new Map();
  const tableKey = (table) => {
    const region = table.closest("[data-live]");
    return `${region ? region.dataset.live : ""}/${all("table.cards", region || document).indexOf(table)}`;
  };
  const valueOf = (cell) => {
    const time = cell && one("time", cell);
    return time ? time.dateTime : ((cell && cell.textContent) || "").trim();
  };

  function sortTables() {
    for (const table of all("table.cards")) {
      for (const button of all("button.sort", table)) button.disabled = false;
      const rows = table.tBodies.length ? Array.from(table.tBodies[0].rows) : [];
      rows.forEach((row, place) => { row.place = place; });
      sortRows(table, rows);
    }
  }

  function sortRows(table, rows) {
    const wanted = order.get(tableKey(table));
    for (const head of all("th", table)) {
      const mine = wanted && head.cellIndex === wanted.column;
      if (mine) head.setAttribute("aria-sort", wanted.up ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    }
    const keys = new Map(rows.map((row) => [row, wanted ? valueOf(row.cells[wanted.column]) : ""]));
    const number = (text) => Number(text.replace(/,/g, ""));
    const numeric = wanted && rows.every((row) => keys.get(row) === "" || !Number.isNaN(number(keys.get(row))));
    const compare = (a, b) => {
      const [x, y] = [keys.get(a), keys.get(b)];
      if (!wanted || x === y) return a.place - b.place;
      if (x === "" || y === "") return x === "" ? 1 : -1;
      const found = numeric ? number(x) - number(y) : x.localeCompare(y, "en", { numeric: true });
      return (wanted.up ? found : -found) || a.place - b.place;
    };
    const sorted = [...rows].sort(compare);
    if (sorted.some((row, place) => rows[place] !== row)) table.tBodies[0].append(...sorted);
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button.sort");
    if (!button) return;
    const [table, column] = [button.closest("table"), button.closest("th").cellIndex];
    const before = order.get(tableKey(table));
    if (!before || before.column !== column) order.set(tableKey(table), { column, up: true });
    else if (before.up) order.set(tableKey(table), { column, up: false });
    else order.delete(tableKey(table));
    sortRows(table, Array.from(table.tBodies[0].rows));
  });

  // ---- selections -----------------------------------------------------------------------------------------------------

  const boxesOf = (bar) => all("input[data-pick]", bar.parentElement);
  function showPicked() {
    for (const bar of all("[data-picked]")) {
      const boxes = boxesOf(bar);
      const number = boxes.filter((box) => box.checked).length;
      bar.hidden = !number;
      one("strong", bar).textContent = `${number} selected`;
      const every = one("input[data-pick-all]", bar.parentElement);
      every.checked = number > 0 && number === boxes.length;
      every.indeterminate = number > 0 && number < boxes.length;
    }
  }
  document.addEventListener("change", (event) => {
    if (event.target.matches("input[data-pick-all]")) {
      for (const box of all("input[data-pick]", event.target.closest("table"))) box.checked = event.target.checked;
    }
    if (event.target.matches("input[data-pick], input[data-pick-all]")) showPicked();
  });

  // ---- charts: the values of the step below the pointer, or by the arrow keys -----------------------------------------------

  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  tip.setAttribute("role", "status");
  document.body.append(tip);
  let pointed = null;

  const rowsOf = (svg) => svg.dataset.values.split("|").map((row) => row.split(","));
  function placeAt(svg, clientX) {
    const box = svg.getBoundingClientRect();
    const [left, right, length] = [Number(svg.dataset.left), Number(svg.dataset.right), rowsOf(svg)[0].length];
    const x = ((clientX - box.left) * svg.viewBox.baseVal.width) / box.width - left;
    const share = x / (right - left);
    return Math.max(0, Math.min(length - 1, svg.dataset.stacked ? Math.floor(share * length) : Math.round(share * (length - 1))));
  }

  function point(svg, place) {
    const rows = rowsOf(svg);
    const [left, right, length] = [Number(svg.dataset.left), Number(svg.dataset.right), rows[0].length];
    const share = svg.dataset.stacked ? (place + 0.5) / length : place / Math.max(1, length - 1);
    const line = one(".cursor", svg) || svg.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "line"));
    line.setAttribute("class", "cursor");
    const x = String(left + share * (right - left));
    for (const [name, value] of [["x1", x], ["x2", x], ["y1", "10"], ["y2", "146"]]) line.setAttribute(name, value);
    const seconds = (length - 1 - place) * Number(svg.dataset.step);
    const zone = stored("reefknot-times");
    const when = seconds ? ago(seconds) : "now";
    const head = zone in clocks ? `${clocks[zone].format(Date.now() - seconds * 1000)}, ${when}` : when;
    const names = svg.dataset.names.split("|");
    tip.replaceChildren(made("strong", head), ...names.map((name, row) => made("p", `${name}: ${rows[row][place] || "–"}`)));
    tip.hidden = false;
    const box = svg.getBoundingClientRect();
    const at = box.left + (Number(x) * box.width) / svg.viewBox.baseVal.width;
    tip.style.left = `${Math.max(4, Math.min(innerWidth - tip.offsetWidth - 4, at - tip.offsetWidth / 2))}px`;
    tip.style.top = `${box.top > tip.offsetHeight + 8 ? box.top - tip.offsetHeight - 4 : box.bottom + 4}px`;
    pointed = { svg, place };
  }

  function unpoint() {
    if (!pointed) return;
    const line = one(".cursor", pointed.svg);
    if (line) line.remove();
    pointed = null;
    tip.hidden = true;
  }
  function pointAgain() {
    if (!pointed) return;
    if (pointed.svg.isConnected) point(pointed.svg, Math.min(pointed.place, rowsOf(pointed.svg)[0].length - 1));
    else unpoint();
  }
  const chartOf = (event) => event.target.closest && event.target.closest("svg[data-values]");
  document.addEventListener("pointermove", (event) => {
    const svg = chartOf(event);
    if (svg) point(svg, placeAt(svg, event.clientX));
    else if (pointed && document.activeElement !== pointed.svg) unpoint();
  });
  document.addEventListener("focusin", (event) => {
    const svg = chartOf(event);
    if (svg) point(svg, rowsOf(svg)[0].length - 1);
    else unpoint();
  });
  document.addEventListener("keydown", (event) => {
    const svg = chartOf(event);
    if (!svg || !pointed) return;
    const [last, at] = [rowsOf(svg)[0].length - 1, pointed.place];
    const next = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last }[event.key];
    if (event.key === "Escape") unpoint();
    if (next === undefined) return;
    event.preventDefault();
    point(svg, Math.max(0, Math.min(last, next)));
  });
  addEventListener("scroll", unpoint, { passive: true });

  // Where the focus goes when its row leaves: to the same button of the next row, else to the content.
  const placeOf = (element) => {
    const row = element.closest("tr[data-key]");
    if (!row) return { verb: element.dataset.verb, keys: [] };
    const rows = Array.from(row.parentElement.children);
    const at = rows.indexOf(row);
    return { verb: element.dataset.verb, keys: [...rows.slice(at), ...rows.slice(0, at).reverse()].map(keyOf) };
  };

  function focusNear({ verb, keys }) {
    for (const key of keys) {
      const row = one(`tr[data-key="${CSS.escape(key)}"]`);
      const near = row && ((verb && one(`[data-verb="${CSS.escape(verb)}"]`, row)) || one("button, a", row));
      if (near) { near.focus(); return; }
    }
    one("#main").focus({ preventScroll: true });
  }

  // An effect of one's own is shown at once, and again a little later, for what a worker does only after it was told.
  const AGAIN_MS = [0, 400, 1000, 2000, 4000];
  let renewal = 0;

  async function renew() {
    const mine = ++renewal;
    for (const wait of AGAIN_MS) {
      await new Promise((done) => { setTimeout(done, wait); });
      if (mine !== renewal) return;
      try {
        const response = await ask(location.href);
        const html = await response.text();
        if (response.ok && mine === renewal) take(html);
      } catch { /* the stream will tell */ }
    }
  }

  const live = { stream: null, wait: 1000, timer: null };

  function tell(state, words) {
    const shown = one("#live-state");
    if (shown) { shown.dataset.state = state; shown.textContent = { live: "live", lost: "not live", wait: "connecting" }[state]; }
    const banner = one("#lost");
    if (banner) {
      banner.hidden = state !== "lost";
      one("#lost-why").textContent = words || "The connection to the server is lost.";
    }
  }

  const hear = {
    fragment: (text) => { live.wait = 1000; tell("live"); take(text); },
    problem: (text) => tell("lost", text),
  };

  // The stream is read by hand: an EventSource cannot send the key.
  async function follow(url, signal) {
    const response = await ask(url, { signal, headers: { Accept: "text/event-stream" } });
    if (!response.ok) return;
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let kept = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const messages = (kept + value).split("\n\n");
      kept = messages.pop();
      for (const message of messages) {
        const [, event, data] = message.match(/^event: (\w+)\ndata: (.*)$/) || [];
        if (event in hear && !signal.aborted) hear[event](JSON.parse(data));
      }
    }
  }

  async function connect() {
    const url = document.body.dataset.liveUrl;
    if (!url || live.stream) return;
    const mine = live.stream = new AbortController();
    try { await follow(url, mine.signal); } catch { /* the server is away, or the page goes */ }
    if (mine !== live.stream) return;
    disconnect();
    tell("lost");
    live.timer = setTimeout(connect, live.wait * (0.75 + Math.random() / 2));
    live.wait = Math.min(30000, live.wait * 2);
    try {
      const response = await ask(location.href, { method: "HEAD", redirect: "manual" });
      if (response.type === "opaqueredirect") tell("lost", "The session has ended: load the page again to log in.");
    } catch { /* the server is away: the banner says so already */ }
  }

  function disconnect() {
    clearTimeout(live.timer);
    const ended = live.stream;
    live.stream = null;
    if (ended) ended.abort();
  }

  // A page in the background costs the system nothing.
  let hiding = null;
  document.addEventListener("visibilitychange", () => {
    clearTimeout(hiding);
    if (document.hidden) hiding = setTimeout(disconnect, 60000);
    else { clearTimeout(live.timer); connect(); }
  });
  addEventListener("pagehide", disconnect);
  addEventListener("pageshow", (event) => { if (event.persisted) connect(); });

  // ---- answers -------------------------------------------------------------------------------------------------------

  const made = (name, words, kind) => {
    const node = document.createElement(name);
    if (words !== undefined) node.textContent = words;
    if (kind) node.className = kind;
    return node;
  };

  const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replace(/'/g, "'\\''")}'`);

  // Lines of a command are broken between its words, never inside of a flag.
  const wordsOf = (line) => {
    const found = line.match(/(?:\\.|[^\s'"]|'[^']*'|"[^"]*")+/g) || [];
    return found.join(" ") === line ? found : [line];
  };
  const showCommand = (code, line) => {
    code.replaceChildren(...wordsOf(line).flatMap((word, place) => [...(place ? [" "] : []), made("span", word)]));
  };

  function cliOf(words) {
    const box = made("div", undefined, "cli");
    const copy = made("button", "copy");
    copy.type = "button";
    copy.dataset.copy = "";
    const code = made("code");
    showCommand(code, words);
    box.append(code, copy);
    return box;
  }

  function say({ title, lines = [], link, cli, bad = false }) {
    const box = made("div", undefined, bad ? "told bad" : "told");
    const head = made("div", undefined, "acts-row");
    const close = made("button", "dismiss", "small");
    close.type = "button";
    close.addEventListener("click", () => box.remove());
    head.append(made("strong", title), close);
    box.append(head, ...lines.map((line) => made("p", line)));
    if (link) {
      const leads = made("a", link.words);
      leads.href = link.path;
      box.append(leads);
    }
    if (cli) box.append(cliOf(cli));
    const status = one("#status");
    status.append(box);
    while (status.children.length > 3) status.firstChild.remove();
    if (!bad) setTimeout(() => box.remove(), 20000);
  }

  // An answer that outlives its page: the next one tells it.
  const KEPT = "reefknot-told";
  function sayThere(path, told) {
    try { sessionStorage.setItem(KEPT, JSON.stringify(told)); } catch { /* the page itself shows the effect */ }
    location.assign(path);
  }
  function sayKept() {
    try {
      const told = sessionStorage.getItem(KEPT);
      sessionStorage.removeItem(KEPT);
      if (told) say(JSON.parse(told));
    } catch { /* nothing was kept */ }
  }

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copy]");
    if (!button) return;
    const code = one("code", button.parentElement);
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "copied";
    } catch {
      document.getSelection().selectAllChildren(code);
      button.textContent = "selected";
    }
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  });

  // ---- actions: a dialog with the count before, the reason, and the command that does the same -----------------------------

  // A payload that somebody typed is sent as it was typed: no long number is rounded, and the server sees a key that is
  // there twice.
  function bodyOf(fields, typed) {
    const text = JSON.stringify(fields);
    if (!typed) return text;
    return `${text.slice(0, -1)}${text === "{}" ? "" : ","}${JSON.stringify(typed.name)}:${typed.text}}`;
  }

  async function post(url, fields, typed) {
    const response = await ask(url, {
      method: "POST",
      headers: { "Content-Type": "application/json", Accept: "application/json" },
      body: bodyOf(fields, typed),
    });
    const text = await response.text();
    let answer = {};
    try { answer = JSON.parse(text); } catch { answer = { error: { message: text.slice(0, 500) } }; }
    if (!response.ok) {
      const error = new Error((answer.error && answer.error.message) || `the server answered with status ${response.status}`);
      error.status = response.status;
      throw error;
    }
    return answer;
  }

  function summary(answer) {
    const lines = [];
    if (typeof answer.count === "number") lines.push(`${answer.count} ${answer.count === 1 ? "job" : "jobs"}`);
    const types = Object.entries(answer.by_type || {}).map(([kind, number]) => `${number} ${kind}`);
    if (types.length) lines.push(types.join(", "));
    if (answer.was && answer.state) lines.push(answer.was === answer.state ? `now ${answer.was}` : `${answer.was} → ${answer.state}`);
    if (answer.missing && answer.missing.length) lines.push(`missing: ${answer.missing.join(", ")}`);
    lines.push(...(answer.reasons || []), ...(answer.hints || []));
    return lines;
  }

  const dialog = one("#act");
  let acting = null;

  function edited(button) {
    const field = button.dataset.edit && one(button.dataset.edit);
    if (!field) return undefined;
    const problem = one(`#${field.getAttribute("aria-describedby")}`);
    try {
      JSON.parse(field.value);
      problem.hidden = true;
      field.removeAttribute("aria-invalid");
      return { name: field.name, text: field.value };
    } catch (error) {
      problem.textContent = `not JSON: ${error.message}; accepted: a JSON object, such as {"url": "https://example.org"}`;
      problem.hidden = false;
      field.setAttribute("aria-invalid", "true");
      field.focus();
      return null;
    }
  }

  const reasonOf = () => one("#act-because").value.trim();

  function twin() {
    const because = reasonOf();
    const more = because && acting.because !== "none" ? ` --because ${quoted(because)}` : "";
    return acting.requests.map((request) => request.cli + more).join(" && ");
  }

  // The requests of an action: one, or for selected rows one for each tenant.
  function requestsOf(button) {
    const data = button.dataset;
    if (data.many === undefined) return [{ url: data.url, cli: data.cli, body: JSON.parse(data.body || "{}") }];
    const boxes = boxesOf(button.closest("[data-picked]")).filter((box) => box.checked);
    const groups = new Map();
    for (const box of boxes) {
      const key = box.dataset.tenant || "";
      groups.set(key, [...(groups.get(key) || []), box.dataset]);
    }
    return Array.from(groups.values(), (rows) => {
      const [ids, tenant] = [rows.map((row) => row.pick), rows[0].tenant];
      const cli = `${data.cli} ${ids.map(quoted).join(" ")}${tenant ? ` --tenant ${quoted(tenant)}` : ""}`;
      return { url: data.url, cli, body: { ids, ...(tenant ? { tenant } : {}) } };
    });
  }

  // The answers to all requests as one. What was done before one of them is refused, is done.
  async function postAll(requests, more, typed) {
    const whole = { count: 0, by_type: {} };
    let done = 0;
    for (const { url, body } of requests) {
      let answer;
      try {
        answer = await post(url, { ...body, ...more }, typed);
      } catch (error) {
        if (done && !more.dry_run) error.message = `${done} of ${requests.length} done, then: ${error.message}`;
        throw error;
      }
      done += 1;
      if (requests.length === 1) return answer;
      whole.actor = answer.actor;
      whole.count += typeof answer.count === "number" ? answer.count : 1;
      for (const [kind, number] of Object.entries(answer.by_type || {})) whole.by_type[kind] = (whole.by_type[kind] || 0) + number;
      for (const name of ["missing", "reasons", "hints"]) whole[name] = [...new Set([...(whole[name] || []), ...(answer[name] || [])])];
    }
    return whole;
  }

  const showTwin = () => showCommand(one("#act-cli code"), twin());

  async function begin(button) {
    const typed = edited(button);
    if (typed === null) return;
    const data = button.dataset;
    const requests = requestsOf(button);
    const rows = data.many === undefined ? 0 : boxesOf(button.closest("[data-picked]")).filter((box) => box.checked).length;
    const title = rows ? `${data.act} ${rows} selected ${rows === 1 ? "job" : "jobs"}` : data.act;
    acting = { title, requests, because: data.because || "none", event: data.event, typed, from: button,
      place: placeOf(button), then: data.then, many: rows > 0 };
    one("#act-title").textContent = acting.title;
    one("#act-effect").textContent = data.effect || "";
    one("#act-effect").hidden = !data.effect;
    one("#act-because").value = "";
    one("#act-because").required = acting.because === "required";
    one("#act-because-field").hidden = acting.because === "none";
    one("#act-because-kind").textContent = acting.because === "required" ? "Reason (needed)" : "Reason (optional)";
    one("#act-problem").hidden = true;
    one("#act-event").textContent = acting.event;
    const go = one("#act-go");
    go.className = data.risky === undefined ? "main" : "main risky";
    go.textContent = data.verb || acting.title;
    showTwin();
    const counts = one("#act-counts");
    counts.replaceChildren();
    counts.hidden = data.preview === undefined;
    go.disabled = data.preview !== undefined;
    dialog.showModal();
    if (acting.because !== "none") one("#act-because").focus();
    else go.focus();
    if (data.preview === undefined) return;
    counts.append(made("p", "counting …", "note"));
    const mine = acting;
    try {
      const because = acting.because === "required" ? { because: "dry run" } : {};
      const answer = await postAll(acting.requests, { ...because, dry_run: true }, acting.typed);
      if (mine !== acting) return;
      const lines = summary(answer);
      counts.replaceChildren(...lines.map((line, place) => made("p", line, place ? "note" : "count")));
      if (Array.isArray(answer.diff)) counts.append(made("pre", answer.diff.join("\n") || "the payload is the same"));
      go.disabled = answer.count === 0;
      if (answer.count === 0) counts.append(made("p", "nothing matches any more", "note"));
    } catch (error) {
      if (mine !== acting) return;
      counts.replaceChildren();
      problem(error.message);
    }
    if (acting.because === "none" && !go.disabled) go.focus();
  }

  function problem(words) {
    const field = one("#act-problem");
    field.textContent = words;
    field.hidden = false;
  }

  // The job that runs instead of an edited one.
  function successor(answer) {
    if (!answer.replaces || !Array.isArray(answer.requeued) || !answer.requeued.length) return undefined;
    const [id] = answer.requeued;
    const tenant = answer.tenant_ids && answer.tenant_ids[0];
    return { words: `job ${id}`, path: `/work/${encodeURIComponent(id)}${tenant ? `?tenant=${encodeURIComponent(tenant)}` : ""}` };
  }

  async function perform() {
    const because = reasonOf();
    if (acting.because === "required" && !because) {
      problem("a reason is needed: it is kept in the audit log");
      one("#act-because").focus();
      return;
    }
    const go = one("#act-go");
    go.disabled = true;
    try {
      const answer = await postAll(acting.requests, because ? { because } : {}, acting.typed);
      const actor = answer.actor ? ` by ${answer.actor}` : "";
      const link = successor(answer);
      const told = { title: `${acting.title}: done`, lines: [...summary(answer), `audited as ${acting.event}${actor}`], link, cli: twin() };
      dialog.close();
      if (acting.many) for (const box of all("input[data-pick]")) box.checked = false;
      showPicked();
      if (acting.then) sayThere(link ? link.path : acting.then, told);
      else { say(told); renew(); }
    } catch (error) {
      problem(error.status === 401 ? "the session has ended: open the login page and give the token again" : error.message);
    }
    go.disabled = false;
  }

  if (dialog) {
    document.addEventListener("click", (event) => {
      const button = event.target.closest("button[data-act]");
      if (button) begin(button);
    });
    one("#act-because").addEventListener("input", showTwin);
    one("#act form").addEventListener("submit", (event) => { event.preventDefault(); perform(); });
    one("#act-cancel").addEventListener("click", () => dialog.close());
    dialog.addEventListener("close", () => {
      if (!acting) return;
      if (acting.from.isConnected) acting.from.focus();
      else focusNear(acting.place);
    });
  }

  // ---- keyboard ------------------------------------------------------------------------------------------------------

  let waiting = 0;
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select, dialog[open]")) return;
    const help = one("#keys");
    if (event.key === "?" && help) { event.preventDefault(); help.showModal(); return; }
    if (event.key === "/") {
      const field = one("form.search input, form.filter input:not([type=hidden]), form.filter select");
      if (field) {
        event.preventDefault();
        const fold = field.closest("details");
        if (fold) fold.open = true;
        field.focus();
      }
      return;
    }
    if (event.key === "g") { waiting = Date.now(); return; }
    if (waiting && Date.now() - waiting < 1500) {
      const link = one(`nav a[data-go="${CSS.escape(event.key)}"]`);
      if (link) { event.preventDefault(); link.click(); }
    }
    waiting = 0;
  });
  document.addEventListener("click", (event) => {
    if (event.target.closest("[data-keys]")) one("#keys").showModal();
    const shut = event.target.closest("[data-shut]");
    if (shut) shut.closest("dialog").close();
  });

  // The printed address, opened by somebody who is logged in: its token leaves the window at once, and its role is taken.
  async function takeToken() {
    const token = new URLSearchParams(location.hash.slice(1)).get("token");
    if (!token) return;
    history.replaceState(null, "", location.pathname + location.search);
    const name = document.body.dataset.actor || "";
    const body = new URLSearchParams({ token, name, next: "/" });
    try {
      const response = await fetch("/login", { method: "POST", credentials: "same-origin", headers: { Accept: "application/json" }, body });
      if (response.ok) { store(KEY, (await response.json()).key); location.reload(); return; }
      const why = response.status === 403 ? "Each start makes a new one, unless one is configured." : `The server answered with status ${response.status}.`;
      say({ title: "The token of this address is not accepted", lines: [why, "You are still logged in as before."], bad: true });
    } catch { /* the banner says that the server is away */ }
  }
  addEventListener("hashchange", takeToken);
  takeToken();

  const leave = one("#leave");
  if (leave) {
    leave.addEventListener("submit", async (event) => {
      if (!stored(KEY)) return; // begun without a script, ended without one
      event.preventDefault();
      try {
        await ask("/logout", { method: "POST", redirect: "manual" });
        localStorage.removeItem(KEY);
        location.assign("/login");
      } catch { tell("lost"); }
    });
  }

  // The page is put into another one that has no height when a browser goes back to where somebody was.
  addEventListener("pagehide", () => history.replaceState({ ...history.state, scrolled: scrollY }, ""));
  if (history.state && history.state.scrolled) scrollTo(0, history.state.scrolled);
  sayKept();
  // On a narrow window a filter that filters nothing is folded, so that the first row is seen.
  const narrow = matchMedia("(max-width: 700px)");
  const fold = () => { for (const box of all("details.fold")) box.open = !narrow.matches || box.dataset.kept !== undefined; };
  narrow.addEventListener("change", fold);
  fold();
  const current = one("nav [aria-current]");
  if (current) current.parentElement.parentElement.parentElement.scrollLeft = current.offsetLeft - 40;
  const settings = one("#settings");
  if (settings) {
    settings.hidden = false;
    for (const [name, changed] of [["theme", setTheme], ["times", dress]]) {
      const field = one(`#${name}`);
      field.value = stored(`reefknot-${name}`);
      field.addEventListener("change", () => { store(`reefknot-${name}`, field.value); changed(); });
    }
  }
  dress();
  setInterval(tick, 1000);
  connect();
});
