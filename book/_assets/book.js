// Search fetches each hit for its excerpt, which a browser refuses for pages in a folder.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;

// An excerpt has neither buttons' labels nor formulas' source.
if (typeof Search !== "undefined") {
  const plain = Search.htmlToText;
  Search.htmlToText = function (page, anchor) {
    const box = new DOMParser().parseFromString(page, "text/html");
    box.querySelectorAll("summary, .onlyprint, .labcore-facts").forEach(function (one) {
      one.remove();
    });
    box.querySelectorAll(".math").forEach(function (one) { one.textContent = "…"; });
    return plain(box.documentElement.outerHTML, anchor);
  };
}

// What is wider than the page scrolls by itself: it fades where more follows, and a keyboard must be
// able to reach a formula (the theme sees to code and tables).
(function () {
  "use strict";
  var FORMULA = 'mjx-container[display="true"]';
  var WIDE = FORMULA + ", pre, .pst-scrollable-table-container, .cell_output .output, " +
    ".labcore-intervals, .labcore-table";

  function fade(box) {
    box.classList.toggle("labcore-more", box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
  }

  function mark() {
    document.querySelectorAll(FORMULA).forEach(function (formula) {
      if (formula.scrollWidth > formula.clientWidth) {
        formula.tabIndex = 0;
        formula.setAttribute("role", "group");
        formula.setAttribute("aria-label", "Formula; the arrow keys move it sideways");
      } else {
        ["tabindex", "role", "aria-label"].forEach(function (name) { formula.removeAttribute(name); });
      }
    });
    document.querySelectorAll(WIDE).forEach(fade);
  }

  window.addEventListener("load", function () {
    mark();
    window.addEventListener("resize", mark);
    document.addEventListener("toggle", mark, true);  // what was folded has a width now
    document.addEventListener("scroll", function (event) {
      if (event.target.matches && event.target.matches(WIDE)) fade(event.target);
    }, { capture: true, passive: true });
    if (window.MathJax && MathJax.startup) MathJax.startup.promise.then(mark);
  });
})();
