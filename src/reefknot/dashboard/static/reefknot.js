// Live fragments, actions with their confirmation, keyboard shortcuts. Every page reads fine without this script.
"use strict";
(() => {
  const one = (choice, within = document) => within.querySelector(choice);
  const all = (choice, within = document) => Array.from(within.querySelectorAll(choice));

  // ---- requests: a cookie goes to every port of this host, the key only where this script sends it -------------------------

  const KEY = "reefknot-key";
  const stored = (name) => { try { return localStorage.getItem(name) || ""; } catch { return ""; } };
  const store = (name, value) => { try { localStorage.setItem(name, value); } catch { /* it lasts for this page */ } };

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
  const tick = () => {
    for (const time of all("time[data-relative]")) {
      const words = ago((Date.now() - Date.parse(time.dateTime)) / 1000);
      if (time.textContent !== words && words !== "NaN d") time.textContent = words;
    }
  };

  // ---- live: new fragments go into the old ones, so that focus, scroll and open details stay ----------------------------

  const keyOf = (node) => (node.nodeType === 1 ? node.id || node.getAttribute("data-key") : null);

  function takeAttributes(from, to) {
    const keeps = (name) => (from.nodeName === "DETAILS" && name === "open") || (from.nodeName === "INPUT" && name === "checked");
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
    return (region.contains(active) && /^(INPUT|TEXTAREA|SELECT)$/.test(active.nodeName))
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
    tick();
  }

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
    return acting.cli + (because && acting.because !== "none" ? ` --because ${quoted(because)}` : "");
  }

  const showTwin = () => showCommand(one("#act-cli code"), twin());

  async function begin(button) {
    const typed = edited(button);
    if (typed === null) return;
    const data = button.dataset;
    acting = { title: data.act, url: data.url, cli: data.cli, because: data.because || "none", event: data.event,
      body: JSON.parse(data.body || "{}"), typed, from: button, place: placeOf(button), then: data.then };
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
      const answer = await post(acting.url, { ...acting.body, ...because, dry_run: true }, acting.typed);
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
      const answer = await post(acting.url, { ...acting.body, ...(because ? { because } : {}) }, acting.typed);
      const actor = answer.actor ? ` by ${answer.actor}` : "";
      const link = successor(answer);
      const told = { title: `${acting.title}: done`, lines: [...summary(answer), `audited as ${acting.event}${actor}`], link, cli: twin() };
      dialog.close();
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
      const field = one("form.filter input:not([type=hidden]), form.filter select");
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
  tick();
  setInterval(tick, 1000);
  connect();
})();
