// Drives the figures of a static page: HTML controls choose one of the stored frames, plotly draws
// it. The first two controls move within a slice of frames; the others choose a slice, which is
// loaded as a script when it is needed. A figure with a formula has one frame, and computes the rest.
// Plotly is loaded after the page, and a figure is drawn when it comes near the window.
(function () {
  "use strict";

  var NARROW = 480; // below this many pixels the type is smaller
  var ACROSS = 2; // controls that move within a slice
  var NEAR = "600px 0px"; // a figure this far below or above the window is drawn
  var PLOTLY = document.currentScript.src.replace(/twin\.js.*/, "vendor/plotly.min.js");

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

  // Calls done once the script `name`, beside the explorer's own, has run.
  var loading = {};
  function load(key, name, done) {
    if (!loading[name]) {
      var script = document.createElement("script");
      var own = document.querySelector('script[src*="' + key + '.js"]').src;
      script.src = own.replace(key + ".js", name + ".js");
      loading[name] = new Promise(function (resolve) { script.onload = resolve; });
      script.onerror = function () { delete loading[name]; }; // the next move tries again
      document.head.appendChild(script);
    }
    loading[name].then(done);
  }

  // Figures to draw: one in an animation frame, so that a scroll never waits for two.
  var waiting = [];
  function drawNext() {
    var twin = waiting.shift();
    if (waiting.length) requestAnimationFrame(drawNext);
    twin.draw();
  }

  function loadPlotly() {
    if (window.Plotly) return;
    var script = document.createElement("script");
    script.src = PLOTLY;
    script.onload = function () { if (waiting.length) requestAnimationFrame(drawNext); };
    document.head.appendChild(script);
  }

  function Twin(element, packed) {
    this.packed = packed;
    this.key = element.dataset.twin;
    this.across = packed.formula ? packed.controls.length : ACROSS;
    this.plot = element.querySelector(".twin-plot");
    // One input for each control; checkboxes for the nodes of a tree.
    this.inputs = Array.from(element.querySelectorAll(".twin-control"), function (control) {
      var found = Array.from(control.querySelectorAll("input, select"));
      return control.matches(".twin-nodes") ? found : found[0];
    });
    this.width = null; // at which it was drawn
    var twin = this;
    this.inputs.forEach(function (input, number) {
      [].concat(input).forEach(function (one) {
        one.addEventListener("input", function () {
          if (Array.isArray(input)) twin.tidy(number, Number(one.value));
          twin.moved();
          twin.prefetch();
        });
      });
    });
    // The width decides on the title's lines, so a change of it draws anew.
    new ResizeObserver(function () {
      if (twin.width !== null && twin.plot.clientWidth !== twin.width) twin.moved();
    }).observe(this.plot);
    new IntersectionObserver(function (entries, observer) {
      if (!entries.some(function (entry) { return entry.isIntersecting; })) return;
      observer.disconnect();
      twin.moved();
    }, {rootMargin: NEAR}).observe(this.plot);
  }

  Twin.prototype.position = function (number) {
    var input = this.inputs[number];
    return input.type === "checkbox" ? Number(input.checked) : Number(input.value);
  };

  // Once a node of a tree was switched: its ancestors come with it, what lies below goes with it.
  Twin.prototype.tidy = function (number, node) {
    var boxes = this.inputs[number], parents = this.packed.controls[number].parents;
    if (boxes[node].checked) {
      for (var up = node; up >= 0; up = parents[up]) boxes[up].checked = true;
    } else {
      boxes.forEach(function (box, below) {
        if (parents[below] >= 0 && !boxes[parents[below]].checked) box.checked = false;
      });
    }
  };

  // Points of the trace whose `meta` is the control's name are the nodes of its tree.
  Twin.prototype.listen = function () {
    var twin = this;
    this.packed.controls.forEach(function (control, number) {
      if (control.kind !== "nodes") return;
      twin.plot.on("plotly_click", function (event) {
        var point = event.points[0];
        if (point.data.meta !== control.name || !(point.customdata >= 0)) return;
        twin.inputs[number][point.customdata].click();
      });
    });
  };

  // The index that controls `from` to `to` choose, in row-major order; `shifted` moves one of them.
  Twin.prototype.index = function (from, to, shifted, by) {
    var index = 0;
    for (var number = from; number < to; number++) {
      var values = this.packed.controls[number].values.length;
      var at = this.position(number) + (number === shifted ? by : 0);
      if (at < 0 || at >= values) return -1;
      index = index * values + at;
    }
    return index;
  };

  // The slice with this index, or null while it loads; then `done` is called.
  Twin.prototype.slice = function (index, done) {
    var twin = this, name = this.key + "-" + index;
    if (!this.packed.slices[index]) {
      load(this.key, name, function () {
        twin.packed.slices[index] = window.labcoreSlices[name];
        done();
      });
    }
    return this.packed.slices[index];
  };

  Twin.prototype.prefetch = function () {
    for (var number = this.across; number < this.packed.controls.length; number++) {
      [-1, 1].forEach(function (by) {
        var index = this.index(this.across, this.packed.controls.length, number, by);
        if (index >= 0) this.slice(index, function () { /* it is there when it is needed */ });
      }, this);
    }
  };

  Twin.prototype.frame = function () {
    var twin = this, last = this.packed.controls.length;
    var slice = this.slice(this.index(this.across, last), function () { twin.moved(); });
    if (!slice) return null;
    var formula = this.packed.formula;
    var index = formula ? 0 : this.index(0, Math.min(this.across, last));
    var frame = whole(slice.frames[index], Object.assign({}, this.packed.parts, slice.parts));
    if (formula) {
      var chosen = {};
      this.packed.controls.forEach(function (control, number) {
        chosen[control.name] = control.kind === "nodes"
          ? twin.inputs[number].filter(function (box) { return box.checked; })
            .map(function (box) { return Number(box.value); })
          : formula.values[control.name][twin.position(number)];
      });
      window.labcoreFormulas[formula.name](chosen, formula.data, frame);
    }
    return frame;
  };

  Twin.prototype.moved = function () {
    if (waiting.indexOf(this) >= 0) return;
    if (waiting.push(this) === 1 && window.Plotly) requestAnimationFrame(drawNext);
  };

  Twin.prototype.say = function () {
    this.packed.controls.forEach(function (control, number) {
      var input = this.inputs[number];
      if (control.kind === "nodes") {
        var chosen = input.filter(function (box) { return box.checked; }).length;
        input[0].closest("details").querySelector("output").textContent =
          chosen + " of " + input.length;
      }
      if (control.kind !== "range") return;
      var text = control.values[this.position(number)];
      input.setAttribute("aria-valuetext", text);
      input.nextElementSibling.textContent = text;
    }, this);
  };

  Twin.prototype.draw = function () {
    this.say();
    this.width = this.plot.clientWidth;
    var frame = this.frame();
    if (!frame) return; // it is drawn when its slice has come
    var layout = frame.layout, narrow = this.width < NARROW;
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
    var first = !this.plot.on;
    Plotly.react(this.plot, frame.data, layout, {responsive: true, displayModeBar: false});
    if (first) this.listen();
  };

  function start() {
    var twins = Array.from(document.querySelectorAll(".labcore-twin")).map(function (element) {
      return new Twin(element, window.labcoreTwins[element.dataset.twin]);
    });
    var mode = dark();
    new MutationObserver(function () {
      if (dark() === mode) return;
      mode = dark();
      twins.forEach(function (twin) { if (twin.width !== null) twin.moved(); });
    }).observe(document.documentElement, {attributes: true, attributeFilter: ["data-theme"]});
    // Paper shows all of them, at once.
    window.addEventListener("beforeprint", function () {
      twins.forEach(function (twin) {
        if (twin.width === null) window.Plotly ? twin.draw() : twin.moved();
      });
    });
    if (document.readyState === "complete") loadPlotly();
    else window.addEventListener("load", loadPlotly);
  }

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
