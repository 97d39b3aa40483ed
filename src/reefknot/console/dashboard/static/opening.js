// A session's cookie alone gets no data: this script asks for the same page with the key that this origin keeps.
"use strict";
(async () => {
  const say = (words) => { document.getElementById("opening").textContent = words; };
  const logIn = () => location.replace(`/login?next=${encodeURIComponent(location.pathname + location.search)}${location.hash}`);
  let key = "";
  try { key = localStorage.getItem("reefknot-key") || ""; } catch { /* this browser keeps nothing */ }
  if (!key) { logIn(); return; }
  try {
    const response = await fetch(location.href, { credentials: "same-origin", headers: { "X-Reefknot-Key": key } });
    if (response.status === 401 || new URL(response.url).pathname === "/login") { logIn(); return; }
    const text = await response.text();
    if (!(response.headers.get("content-type") || "").startsWith("text/html")) { say(text); return; }
    if (response.redirected) history.replaceState(null, "", response.url);
    document.open();
    document.write(text);
    document.close();
  } catch {
    say("The server does not answer. Load the page again once it runs.");
  }
})();
