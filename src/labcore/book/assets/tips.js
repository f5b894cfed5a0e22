// Shows what a link to the glossary or to the references leads to, on hover and on focus.
(function () {
  "use strict";

  var tip = document.createElement("div"), shown = null, timer;
  tip.id = "labcore-tip";
  tip.className = "tex2jax_process"; // a definition may have mathematics
  tip.setAttribute("role", "tooltip");

  function place() {
    var box = shown.getClientRects()[0], height = tip.offsetHeight;
    var room = document.documentElement.clientWidth - tip.offsetWidth - 8;
    var above = box.bottom + height + 12 > window.innerHeight;
    tip.style.left = window.scrollX + Math.max(8, Math.min(box.left, room)) + "px";
    tip.style.top = window.scrollY + (above ? box.top - height - 4 : box.bottom + 4) + "px";
  }

  function hide() {
    clearTimeout(timer);
    if (!shown) return;
    shown.removeAttribute("aria-describedby");
    shown = null;
    tip.remove();
  }

  function show(event) {
    var link = event.target.closest("a"), text = link && labcoreTips[link.href.split("/").pop()];
    if (tip.contains(event.target) || (link && link === shown)) return clearTimeout(timer);
    if (!text) return leave();
    hide();
    shown = link;
    tip.textContent = text;
    document.body.appendChild(tip);
    link.setAttribute("aria-describedby", tip.id);
    place();
    if (!text.includes("\\(") || !window.MathJax || !MathJax.typesetPromise) return;
    MathJax.typesetPromise([tip]).then(function () { if (shown === link) place(); });
  }

  // The pointer has time to move onto the text; what has the focus keeps it.
  function leave() {
    clearTimeout(timer);
    if (shown !== document.activeElement) timer = setTimeout(hide, 200);
  }

  document.addEventListener("mouseover", show);
  document.addEventListener("focusin", show);
  document.addEventListener("focusout", hide);
  document.addEventListener("keydown", function (event) { if (event.key === "Escape") hide(); });
})();
