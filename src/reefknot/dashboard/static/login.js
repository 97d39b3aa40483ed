// Puts the token of the address (#token=…) into the form, takes it out of the address and out of the history, and logs in.
"use strict";
const form = document.getElementById("login");
function enter() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!given) return;
  history.replaceState(null, "", location.pathname + location.search);
  form.elements.token.value = given;
  if (!document.getElementById("problem").textContent) form.submit();
}
addEventListener("hashchange", enter);
enter();
