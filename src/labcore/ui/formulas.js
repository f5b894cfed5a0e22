// Figures that the page computes: each function takes the controls' values and the data of the
// figure's Python form, and writes what changes into a frame. A test holds the two forms together.
window.labcoreFormulas = (function () {
  "use strict";

  // Three digits and a unit.
  function size(bytes) {
    var power = Math.min(4, Math.floor(Math.log10(Math.max(bytes, 1)) / 3));
    return Number((bytes / Math.pow(1000, power)).toPrecision(3)) + " " +
      ["B", "kB", "MB", "GB", "TB"][power];
  }

  function sum(parts) { return parts.reduce(function (one, other) { return one + other; }, 0); }

  // labcore.memory.estimate for one GPU of `devices`: the parts of the fullest point of a moment,
  // in the order of the bars.
  function fullest(values, data, moment, stage, devices) {
    var own = data[values.model][values.dtype];
    var tokens = values.batch * values.length;
    var optimizer = own.optimizers[values.optimizer];
    var points = moment === "step"
      ? [[0, 8, own.weights, optimizer.workspace, 0, 0, 0, 0]]
      : own.points[values.checkpointing][moment];
    var found = points.map(function (point) {
      var activations = point[0] + tokens * point[1], workspace = point[3] + tokens * point[4];
      var weights = own.weights, gradients = point[2], done = point[5];
      if (moment === "step" && stage >= 1) workspace /= devices;
      if (stage < 2 && devices > 1) gradients = weights;
      if (stage >= 2 && moment === "step") {
        weights /= devices;
        gradients /= devices;
      } else if (stage >= 2) {
        var ahead = own.layers - done, outer = weights - own.layers * own.unit;
        var gathered = stage === 2 ? ahead : Math.min(ahead, point[6]);
        var copied = done > 0 || (moment === "forward" && stage === 2 && point[6] > 0) ? 1 : 0;
        if (point[7]) {
          outer *= 2;
          gathered = Math.min(ahead, 2);
          copied = 0;
        }
        workspace += gradients - done * own.unit + outer + own.unit * (gathered + copied);
        gradients = done * own.unit / devices;
        weights /= devices;
      }
      var state = optimizer.state / (stage >= 1 ? devices : 1);
      return [weights, gradients, state, activations, workspace];
    });
    return found.reduce(function (one, other) { return sum(other) > sum(one) ? other : one; });
  }

  function stacked(columns, capacities, frame) {
    var totals = columns.map(sum), tallest = Math.max.apply(null, totals) / 1e9;
    var above = capacities.filter(function (line) { return line >= tallest; });
    var top = 1.1 * Math.max(tallest, above.length ? above[0] : capacities[capacities.length - 1]);
    frame.data.forEach(function (bar, part) {
      bar.y = columns.map(function (held) { return held[part] / 1e9; });
    });
    frame.layout.yaxis.range = [0, top];
    var last = Infinity;
    frame.layout.annotations.forEach(function (label, number) {
      frame.layout.shapes[number].visible = label.y < top;
      label.visible = label.y < top && last - label.y > 0.05 * top;
      if (label.visible) last = label.y;
    });
    return totals;
  }

  return {
    memoryMoments: function (values, data, frame) {
      var names = frame.data[0].x;
      var totals = stacked(names.map(function (moment) {
        return fullest(values, data.table, moment, 0, 1);
      }), data.capacities, frame);
      var most = Math.max.apply(null, totals);
      frame.layout.title.text = "Peak: " + size(most) + ", in the " + names[totals.indexOf(most)];
    },
    memoryStages: function (values, data, frame) {
      var totals = stacked([0, 1, 2, 3].map(function (stage) {
        return ["forward", "backward", "step"].map(function (moment) {
          return fullest(values, data.table, moment, stage, values.devices);
        }).reduce(function (one, other) { return sum(other) > sum(one) ? other : one; });
      }), data.capacities, frame);
      frame.layout.title.text = "Per GPU: " + size(totals[0]) + " without ZeRO, " +
        size(Math.min.apply(null, totals)) + " at best";
    }
  };
})();
