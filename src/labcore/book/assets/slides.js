// Starts a deck, and makes what would stand over a slide's edge smaller until it does not.
(function () {
  "use strict";

  var WIDTH = 1280, HEIGHT = 720, ROOM = 676; // pixels; ROOM leaves the lower edge to the controls

  // What a slide shows, without the speaker's notes, in one box that can be measured.
  function boxed(section) {
    var box = document.createElement("div");
    box.className = "fit";
    Array.from(section.childNodes).forEach(function (child) {
      if (child.nodeName !== "ASIDE") box.appendChild(child);
    });
    section.insertBefore(box, section.firstChild);
  }

  // A figure's type is small for a room, so a figure is made as large as it may be. The text flows
  // anew at each size, so the height is measured after each step.
  function fit(section) {
    var box = section.querySelector(".fit");
    if (!box) return;
    var zoom = section.querySelector(".labcore-twin") ? 1.4 : 1;
    box.style.zoom = zoom;
    while (zoom > 0.3 && box.scrollHeight * zoom > ROOM) {
      zoom -= 0.05;
      box.style.zoom = zoom;
    }
    section.dataset.zoom = zoom.toFixed(2);
  }

  function flip() {
    var root = document.documentElement;
    root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  }

  Array.from(document.querySelectorAll(".slides section:not(:has(section))")).forEach(boxed);

  // A slider or a list takes its own keys; Escape gives them back to the deck.
  document.addEventListener("keydown", function (event) {
    var control = event.target.closest(".twin-controls");
    if (control && event.key === "Escape") {
      event.target.blur();
      event.stopImmediatePropagation();
    }
  }, true);

  var deck = window.deck = new Reveal({
    width: WIDTH,
    height: HEIGHT,
    margin: 0,
    center: false,
    hash: true,
    transition: "none",
    slideNumber: "c/t",
    navigationMode: "linear",
    keyboard: {68: flip}, // D: dark or light
    keyboardCondition: function () { return !document.activeElement.closest(".twin-controls"); },
    plugins: [RevealNotes]
  });
  deck.on("slidechanged", function (event) { fit(event.currentSlide); });
  Promise.all([deck.initialize(), MathJax.startup.promise]).then(function () {
    fit(deck.getCurrentSlide());
    document.documentElement.dataset.deck = "ready";
  });
})();
