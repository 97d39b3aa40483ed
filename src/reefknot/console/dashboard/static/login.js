// Logs in, and keeps the session's key in the storage of this origin. The token of the address (#token=…) goes into the
// form, out of the address and out of the history. A browser that keeps nothing logs in as it would without a script.
"use strict";
const form = document.getElementById("login");
const problem = document.getElementById("problem");

async function logIn() {
  try { localStorage.removeItem("reefknot-key"); } catch { form.submit(); return; }
  problem.textContent = "";
  try {
    const body = new URLSearchParams(new FormData(form));
    const response = await fetch("/login", { method: "POST", credentials: "same-origin", headers: { Accept: "application/json" }, body });
    const text = await response.text();
    if (!response.ok) {
      problem.textContent = response.status === 403 && text.startsWith("{") ? JSON.parse(text).error.message : text.slice(0, 500);
      form.elements.token.value = "";
      form.elements.token.focus();
      return;
    }
    const answer = JSON.parse(text);
    localStorage.setItem("reefknot-key", answer.key);
    location.replace(answer.next);
  } catch {
    problem.textContent = "The server does not answer. Try again once it runs.";
  }
}

function enter() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!given) return;
  history.replaceState(null, "", location.pathname + location.search);
  form.elements.token.value = given;
  logIn();
}

form.addEventListener("submit", (event) => { event.preventDefault(); logIn(); });
addEventListener("hashchange", enter);
enter();
