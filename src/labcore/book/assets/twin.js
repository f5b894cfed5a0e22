// Drives the figures of a static page: HTML controls choose one of the stored frames, plotly draws
// it. Everything is on the page already; nothing is fetched.
(function () {
  "use strict";

  var NARROW = 480; // below this many pixels the type is smaller

  function dark() {
    return document.documentElement.dataset.theme === "dark";
  }

  // {"$": 3} stands for part 3, which may itself hold earlier parts.
  function whole(value, parts) {
    if (Array.isArray(value)) {
      return value.map(function (item) { return whole(item, parts); });
    }
    if (value === null || typeof value !== "object") return value;
    if ("$" in value) return whole(parts[value.$], parts);
    var out = {};
    Object.keys(value).forEach(function (key) { out[key] = whole(value[key], parts); });
    return out;
  }

  function wrapped(text, letters) {
    var lines = [];
    text.split(/<br\s*\/?>/).forEach(function (part) {
      lines.push("");
      part.split(" ").forEach(function (word) {
        var last = lines[lines.length - 1];
        if (last && last.length + word.length + 1 > letters) lines.push(word);
        else lines[lines.length - 1] = last ? last + " " + word : word;
      });
    });
    return lines.join("<br>");
  }

  function Twin(element, packed) {
    this.packed = packed;
    this.plot = element.querySelector(".twin-plot");
    this.inputs = Array.from(element.querySelectorAll(".twin-control :is(input, select)"));
    this.scheduled = false;
    var twin = this;
    this.inputs.forEach(function (input) {
      input.addEventListener("input", function () { twin.moved(); });
    });
    var controls = element.querySelector(".twin-controls");
    if (controls) controls.hidden = false;
    // The width decides on the title's lines, so a change of it draws anew.
    this.width = this.plot.clientWidth;
    new ResizeObserver(function () {
      if (twin.plot.clientWidth !== twin.width) twin.moved();
    }).observe(this.plot);
    this.draw();
  }

  Twin.prototype.position = function (number) {
    var input = this.inputs[number];
    return input.type === "checkbox" ? Number(input.checked) : Number(input.value);
  };

  Twin.prototype.frame = function () {
    var index = 0;
    this.packed.controls.forEach(function (control, number) {
      index = index * control.values.length + this.position(number);
    }, this);
    return whole(this.packed.frames[index], this.packed.parts);
  };

  Twin.prototype.moved = function () {
    if (this.scheduled) return;
    this.scheduled = true;
    var twin = this;
    requestAnimationFrame(function () { twin.scheduled = false; twin.draw(); });
  };

  Twin.prototype.say = function () {
    this.packed.controls.forEach(function (control, number) {
      if (control.kind !== "range") return;
      var input = this.inputs[number];
      var text = control.values[this.position(number)];
      input.setAttribute("aria-valuetext", text);
      input.nextElementSibling.textContent = text;
    }, this);
  };

  Twin.prototype.draw = function () {
    this.say();
    this.width = this.plot.clientWidth;
    var frame = this.frame(), layout = frame.layout, narrow = this.width < NARROW;
    layout.template = this.packed.templates[dark() ? "dark" : "light"];
    layout.autosize = true;
    layout.uirevision = "kept"; // a zoom stays while a slider moves
    if (layout.dragmode === undefined) layout.dragmode = false; // a finger scrolls the page
    var title = typeof layout.title === "string" ? {text: layout.title} : layout.title || {};
    if (narrow) {
      layout.font = Object.assign({size: 12}, layout.font);
      layout.margin = Object.assign({l: 48, r: 8, b: 44}, layout.margin);
      title.font = Object.assign({size: 13}, title.font);
    }
    if (title.text) {
      // A letter is about 0.56 of the font's size wide.
      title.text = wrapped(title.text, Math.floor((this.width - 24) / (narrow ? 7.4 : 9)));
      var lines = title.text.split("<br>").length;
      layout.margin = Object.assign({t: 24 + lines * (narrow ? 17 : 21)}, layout.margin);
      layout.title = title;
    } else {
      layout.margin = Object.assign({t: 16}, layout.margin);
    }
    return Plotly.react(this.plot, frame.data, layout, {responsive: true, displayModeBar: false});
  };

  function start() {
    var twins = Array.from(document.querySelectorAll(".labcore-twin")).map(function (element) {
      return new Twin(element, window.labcoreTwins[element.dataset.twin]);
    });
    new MutationObserver(function () {
      twins.forEach(function (twin) { twin.draw(); });
    }).observe(document.documentElement, {attributes: true, attributeFilter: ["data-theme"]});
  }

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
