// Search fetches each hit for its excerpt, which a browser refuses for pages in a folder.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;

// A formula wider than the page scrolls by itself; a keyboard must be able to reach it.
(function () {
  "use strict";

  function mark() {
    document.querySelectorAll('mjx-container[display="true"]').forEach(function (formula) {
      if (formula.scrollWidth > formula.clientWidth) {
        formula.tabIndex = 0;
        formula.setAttribute("role", "group");
        formula.setAttribute("aria-label", "Formula; the arrow keys move it sideways");
      } else {
        ["tabindex", "role", "aria-label"].forEach(function (name) { formula.removeAttribute(name); });
      }
    });
  }

  window.addEventListener("load", function () {
    if (!window.MathJax || !MathJax.startup) return;
    MathJax.startup.promise.then(mark);
    window.addEventListener("resize", mark);
  });
})();
