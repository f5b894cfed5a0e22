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

  function seconds(value) {
    var unit = value >= 1 ? 0 : value >= 1e-3 ? 1 : 2, scaled = value * [1, 1e3, 1e6][unit];
    var shown = scaled < 999.5 ? String(Number(scaled.toPrecision(3))) : scaled.toFixed(0);
    return shown + " " + ["s", "ms", "µs"][unit];
  }

  function sum(parts) { return parts.reduce(function (one, other) { return one + other; }, 0); }

  // float16 has the bytes of bfloat16.
  function dtype(values) { return values.dtype === "float16" ? "bfloat16" : values.dtype; }

  // labcore.memory.estimate for one GPU of `devices`: the parts of the fullest point of a moment,
  // in the order of the bars. own: of one model and dtype. way: rows and tokens of a forward,
  // checkpointing, optimizer state and its step's workspace, stage, devices, whether gradients of
  // earlier parts of the batch exist, and whether each goes to main memory once it's complete.
  function fullest(own, way, moment) {
    var stage = way.stage, devices = way.devices, tokens = way.rows * way.length;
    var points = moment === "step"
      ? [[0, 0, 0, 0, own.trained, own.trained, 8 * way.rows, 8, way.workspace, 0]]
      : own.points[way.checkpointing][moment];
    var found = points.map(function (point) {
      var activations = point[6] + tokens * point[7], workspace = point[8] + tokens * point[9];
      var weights = own.weights, gradients = point[4], done = point[0];
      if (moment === "step" && stage >= 1) workspace /= devices;
      var gone = way.offload ? point[5] : done * own.reduced;
      var all = !way.offload && (way.earlier || (stage < 2 && devices > 1));
      if (stage >= 2 && moment !== "step") {
        var ahead = own.layers - done, outer = weights - own.layers * own.unit;
        var gathered = Math.min(ahead, stage === 2 ? point[2] : point[1]);
        var copied = done > 0 || (moment === "forward" && stage === 2 && point[1] > 0) ? 1 : 0;
        if (point[3]) {
          outer *= 2;
          gathered = Math.min(ahead, 2);
          copied = 0;
        }
        workspace += gradients - gone + outer + own.unit * (gathered + copied);
        gradients = way.offload ? 0 : all ? own.trained : gone;
      } else if (way.offload) {
        gradients -= gone;
      } else if (all) {
        gradients = own.trained;
      }
      if (stage >= 2) {
        weights /= devices;
        gradients /= devices;
      }
      return [weights, gradients, way.state / (stage >= 1 ? devices : 1), activations, workspace];
    });
    return found.reduce(higher);
  }

  function higher(one, other) { return sum(other) > sum(one) ? other : one; }

  function peak(own, way) {
    return ["forward", "backward", "step"].map(function (moment) {
      return fullest(own, way, moment);
    }).reduce(higher);
  }

  // Rows that were packed as [times, block, strides].
  function unpacked(runs) {
    var rows = [];
    runs.forEach(function (run) {
      for (var time = 0; time < run[0]; time += 1) {
        run[1].forEach(function (row, place) {
          rows.push(row.map(function (value, n) { return value + time * run[2][place][n]; }));
        });
      }
    });
    return rows;
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

  function grouped(count) { return count.toString().replace(/\B(?=(\d{3})+$)/g, ","); }

  function hundredths(value) { return (value + 1e-9).toFixed(2); }

  // labcore.ui.figures.medusa.step_cost: a 7B's step over `rows` tokens, in plain passes.
  function medusaMachine(values) {
    return "ridge " + (values.ridge + 1e-9).toFixed(0) + ", batch " + values.batch;
  }

  function medusaCost(rows, heads, values, share) {
    var batch = values.batch, ridge = values.ridge;
    return Math.max(1, batch * rows / ridge) / Math.max(1, batch / ridge) + share * heads;
  }

  // What a tree of the chosen nodes would have done to known texts: how many steps, and how often
  // each node was accepted. A text is a string of ranks for each position.
  function medusaReplay(chosen, data, texts) {
    var below = {}, counts = data.parents.map(function () { return 0; }), steps = 0;
    chosen.forEach(function (node) { below[data.parents[node] + " " + data.ranks[node]] = node; });
    texts.forEach(function (text) {
      for (var place = 0; place < text.length; place += 1) {
        var row = text[place], node = -1;
        for (var head = 0; head < row.length; head += 1) {
          var next = below[node + " " + row[head]];
          if (next === undefined) break;
          node = next;
          counts[node] += 1;
          place += 1;
        }
        steps += 1;
      }
    });
    return counts.map(function (count) { return count / steps; });
  }

  return {
    // labcore.memory.film of one GPU.
    memoryFilm: function (values, data, frame) {
      var own = data.table[values.model][dtype(values)], tokens = values.batch * values.length;
      var optimizer = own.optimizers[values.optimizer], capacity = data.cards[values.card];
      function rest(name, gradients, workspace) {
        return {name: name, held: [own.weights, gradients, optimizer.state,
          8 * (tokens + values.batch), workspace]};
      }
      function run(moment) {
        return unpacked(own.films[values.checkpointing][moment]).map(function (row) {
          var place = data.places[row[0]], layer = row[1];
          return {
            name: moment + ", " + (layer ? "layer " + layer : place) +
              (layer && place !== "layer" ? ": " + place : ""),
            // A batch's rows have one token more each; the constants are those of one row.
            held: [own.weights, row[6], optimizer.state,
              row[2] + tokens * row[3] + 8 * (values.batch - 1), row[4] + tokens * row[5]]
          };
        });
      }
      var shown = [[0, rest("end", 0, 0)]];
      [["forward", 0, 30], ["backward", 30, 60]].forEach(function (span) {
        var own = run(span[0]);
        own.forEach(function (scene, n) {
          shown.push([span[1] + span[2] * (n + 1) / own.length, scene]);
        });
      });
      var step = rest("step", own.weights, optimizer.workspace);
      shown.push([92, step], [98, step], [100, rest("end", 0, 0)]);
      var peak = Math.max.apply(null, shown.map(function (one) { return sum(one[1].held); }));
      var before = shown.filter(function (one) { return one[0] <= values.moment + 1e-9; });
      var at = before[before.length - 1], now = at[1];
      var parts = ["parameters", "gradients", "optimizer", "activations", "workspace"];
      frame.data.forEach(function (area, part) {
        area.x = shown.map(function (one) { return one[0]; });
        area.y = shown.map(function (one) { return one[1].held[part] / 1e9; });
        area.name = parts[part] + " " + size(now.held[part]);
      });
      frame.layout.yaxis.range = [0, 1.1 * Math.max(peak, capacity) / 1e9];
      var lines = frame.layout.shapes;
      lines[0].y0 = lines[0].y1 = capacity / 1e9;
      lines[1].x0 = lines[1].x1 = at[0];
      frame.layout.title.text = "Peak " + size(peak) + " of " + size(capacity) + ": " +
        (peak <= capacity ? "fits" : "does not fit") + "<br>" + now.name + ": " +
        size(sum(now.held));
    },
    memoryRequests: function (values, data, frame) {
      var own = data.models[values.model], devices = values.devices;
      var heads = Math.ceil(own.heads[values.heads] / devices);
      var row = own.size * data.bytes[values.kv] + data.scale[values.kv];
      var weights = Math.ceil(own.weights[values.heads][values.weights] / devices);
      var step = 6 * data.batched * (own.width + Math.ceil(own.wide / devices));
      var usable = values.card * 1e7 * (100 - values.reserve);
      var room = Math.max(usable - weights - step, 0);
      function fit(tokens) {
        var slots = Math.ceil(tokens / data.page) * data.page;
        return Math.floor(room / (2 * own.layers * heads * row * slots)) || null;
      }
      var marked = Math.min(values.context, own.longest);
      var most = fit(own.longest);
      frame.data[0].y = data.contexts.map(function (x) { return x <= own.longest ? fit(x) : null; });
      frame.data[1].y = data.contexts.map(function (x) { return x <= own.longest ? most : null; });
      frame.data[2].x = [marked];
      frame.data[2].y = [fit(marked)];
      frame.layout.title.text = room === 0
        ? "No room: " + size(weights) + " of weights, " + size(usable) + " per GPU"
        : grouped(fit(marked) || 0) + " requests of " + grouped(marked) + " tokens in " +
          size(room);
    },
    // labcore.memory.levers.plan after each lever.
    memoryLevers: function (values, data, frame) {
      var plain = {dtype: "float32", optimizer: "adamw", fused: false, checkpointing: "none",
        parts: 1, no_logits: false, zero_stage: 0, offload: false, adapters: false, coded: false};
      var parts = Math.min(values.parts, values.rows), card = data.cards[values.card];
      var names = {
        dtype: data.names.dtype[values.dtype], optimizer: data.names.optimizer[values.optimizer],
        fused: "fused step",
        checkpointing: values.checkpointing === "selective" ? "selective" : "recompute",
        parts: parts + " parts", no_logits: "no logits", zero_stage: "ZeRO " + values.zero_stage,
        offload: "offload", adapters: "LoRA", coded: "4-bit base"
      };
      var labels = ["plain"], ways = [plain];
      Object.keys(names).forEach(function (lever) {
        var value = {parts: parts, adapters: values.adapters !== "none",
          coded: values.adapters === "QLoRA"}[lever];
        if (value === undefined) value = values[lever];
        if (value === plain[lever]) return;
        var now = Object.assign({}, ways[ways.length - 1]);
        now[lever] = value;
        ways.push(now);
        labels.push("+ " + names[lever]);
      });
      var tokens = values.rows * values.length, work = data.work[values.model];
      var attention = values.rows * work.pair * values.length * (values.length + 1) / 2;
      var held = [], times = [];
      ways.forEach(function (way) {
        var kind = (way.no_logits ? 1 : 0) + " " + (way.coded ? 2 : way.adapters ? 1 : 0);
        var own = data.kinds[kind][values.model][way.dtype];
        var optimizer = own.optimizers[way.optimizer];
        held.push(peak(own, {
          rows: Math.ceil(values.rows / way.parts), length: values.length,
          checkpointing: way.checkpointing, state: way.offload ? 0 : optimizer.state,
          workspace: way.offload ? 0 : way.fused ? optimizer.fused : optimizer.workspace,
          stage: way.zero_stage, devices: values.devices, earlier: way.parts > 1,
          offload: way.offload
        }));
        var adapters = way.adapters ? work.adapters : 0;
        var stack = 2 * tokens * (work.matrices + adapters);
        var rate = values.share * card.rates[way.dtype];
        var share = way.zero_stage ? 1 / values.devices : 1;
        var once = 3 * own.trained + 2 * optimizer.state;
        var sent = way.zero_stage >= 2
          ? way.parts * (own.trained + (way.zero_stage - 1) * own.weights) : 2 * own.trained;
        times.push([
          (2 * stack + 2 * tokens * (adapters || work.matrices) +
            2 * tokens * work.head * (way.adapters ? 2 : 3) + 3.5 * attention) / rate,
          way.checkpointing === "every layer"
            ? (stack + attention - (way.adapters ? 0 : 2 * tokens * work.down)) / rate
            : way.checkpointing === "selective"
              ? tokens * work.elementwise[way.dtype] / card.bandwidth : 0,
          share * (way.offload ? once * Math.min(values.devices, data.server) / card.main
            : (way.optimizer === "adamw" && !way.fused ? data.passes * own.trained : once)
              / card.bandwidth),
          way.offload ? share * (way.parts + 1) * own.trained / card.host : 0,
          sent * (values.devices - 1) / values.devices /
            (values.devices <= data.server ? card.link : Math.min(card.link, card.network))
        ]);
      });
      var end = sum(held[held.length - 1]), step = sum(times[times.length - 1]);
      var limits = [data.cut * Math.max(end, card.memory), data.cut * step];
      var bars = [held, times].map(function (all, n) {
        return all.map(function (parts) {
          var left = limits[n];
          return parts.map(function (part) {
            var shown = Math.min(part, left);
            left -= shown;
            return shown;
          });
        });
      });
      frame.data.forEach(function (bar, n) {
        bar.y = labels;
        bar.x = n < 5 ? bars[0].map(function (one) { return one[n] / 1e9; })
          : bars[1].map(function (one) { return one[n - 5]; });
      });
      var longest = bars.map(function (all) { return Math.max.apply(null, all.map(sum)); });
      frame.layout.xaxis.range = [0, 1.3 * Math.max(longest[0], card.memory) / 1e9];
      frame.layout.xaxis2.range = [0, 1.3 * longest[1]];
      [[4, held, size], [9, times, seconds]].forEach(function (told, n) {
        frame.data[told[0]].text = told[1].map(sum).map(function (total) {
          return (total > limits[n] ? "» " : "") + told[2](total);
        });
      });
      frame.layout.shapes[0].x0 = frame.layout.shapes[0].x1 = card.memory / 1e9;
      frame.layout.annotations[0].x = card.memory / 1e9;
      frame.layout.annotations[0].text = size(card.memory) + " card";
      frame.layout.title.text = "Peak " + size(end) + " of " + size(card.memory) + ": " +
        (end <= card.memory ? "fits" : "does not fit") + "<br>" +
        seconds(step) + " per step if nothing overlaps";
    },
    memoryStages: function (values, data, frame) {
      var own = data.table[values.model][dtype(values)];
      var optimizer = own.optimizers[values.optimizer];
      var totals = stacked([0, 1, 2, 3].map(function (stage) {
        return peak(own, {
          rows: values.batch, length: values.length, checkpointing: values.checkpointing,
          state: optimizer.state, workspace: optimizer.workspace, stage: stage,
          devices: values.devices, earlier: false
        });
      }), data.capacities, frame);
      frame.layout.title.text = "Per GPU: " + size(totals[0]) + " without ZeRO, " +
        size(Math.min.apply(null, totals)) + " at best";
    },
    medusaTree: function (values, data, frame) {
      var chosen = values.nodes, chances = data.chances[values.temperature];
      var shares = medusaReplay(chosen, data, data.texts[values.temperature]);
      var inside = data.parents.map(function () { return false; }), depths = [];
      chosen.forEach(function (node) { inside[node] = true; });
      data.parents.forEach(function (up) { depths.push(up < 0 ? 0 : depths[up] + 1); });
      function total(of) { return 1 + sum(chosen.map(function (node) { return of[node]; })); }
      var heads = Math.max.apply(null, [0].concat(chosen.map(function (node) {
        return depths[node] + 1;
      })));
      var here = data.costs[chosen.length] + data.drafting[heads], replayed = total(shares);
      var there = medusaCost(chosen.length + 1, heads, values, data.share);
      var rows = {"-1": [-1, -1]};
      data.order.forEach(function (node, row) { rows[node] = [depths[node], row]; });
      [false, true].forEach(function (chosenOnes, n) {
        var x = [], y = [];
        data.order.forEach(function (node) {
          if (inside[node] !== chosenOnes) return;
          var from = rows[data.parents[node]], to = rows[node];
          x.push(from[0], from[0], to[0], null);
          y.push(from[1], to[1], to[1], null);
        });
        frame.data[n].x = x;
        frame.data[n].y = y;
      });
      function percent(share) { return (100 * share + 1e-9).toFixed(0); }
      var nodes = frame.data[2], marker = nodes.marker;
      nodes.text = ["the text so far"].concat(data.order.map(function (node) {
        return inside[node]
          ? "<b>" + data.ranks[node] + "</b>  " + percent(chances[node]) + "/" +
            percent(shares[node]) + " %"
          : data.ranks[node] + "  " + percent(chances[node]) + " %";
      }));
      marker.symbol = ["circle"].concat(data.order.map(function (node) {
        return inside[node] ? "circle" : "circle-open";
      }));
      marker.color = [1].concat(data.order.map(function (node) { return Math.sqrt(chances[node]); }));
      marker.opacity = [1].concat(data.order.map(function (node) { return inside[node] ? 1 : 0.55; }));
      frame.data[3].x = [total(chances), replayed, replayed / here, replayed / there];
      frame.data[3].y[3] = medusaMachine(values);
      frame.data[3].text = frame.data[3].x.map(hundredths);
      frame.layout.title.text = hundredths(replayed) + " tokens per step, " +
        hundredths(replayed / there) + "x plain";
    },
    medusaSpeed: function (values, data, frame) {
      var rows = data.curves[[values.heads, values.branching, values.temperature].join(" ")];
      var sizes = rows.map(function (row, n) { return n + 1; });
      var at = Math.min(values.nodes, rows.length);
      function column(n) { return rows.map(function (row) { return row[n]; }); }
      var middle = column(1);
      var costs = [
        sizes.map(function (n) { return data.costs[n] + data.drafting[values.heads]; }),
        sizes.map(function (n) { return medusaCost(n + 1, values.heads, values, data.share); })
      ];
      var fast = costs.map(function (each) {
        return middle.map(function (y, n) { return y / each[n]; });
      });
      [[0, column(0)], [1, middle], [3, costs[0]], [4, costs[1]], [6, fast[0]],
        [7, fast[1]]].forEach(function (line) {
        frame.data[line[0]].x = sizes;
        frame.data[line[0]].y = line[1];
      });
      frame.data[4].name = medusaMachine(values) + ", by formula";
      frame.data[1].error_y.array = rows.map(function (row) { return row[3] - row[1]; });
      frame.data[1].error_y.arrayminus = rows.map(function (row) { return row[1] - row[2]; });
      [[2, middle], [5, costs[1]], [8, fast[1]]].forEach(function (ring) {
        frame.data[ring[0]].x = [at];
        frame.data[ring[0]].y = [ring[1][at - 1]];
      });
      frame.layout.title.text = at + " node" + (at === 1 ? "" : "s") + ": " +
        hundredths(fast[0][at - 1]) + "x on this CPU, " + hundredths(fast[1][at - 1]) + "x there";
    },
    // Speed over plain decoding by batch size: labcore.decoding.theory.speedup.Roofline.
    speculativeBatches: function (values, data, frame) {
      var model = data.models[values.model];
      var place = Math.round(Math.log2(values.batch)), rows = data.batches[place];
      var length = Math.round(values.context), gained = 0;
      for (var i = 0; i <= values.gamma; i += 1) gained += Math.pow(values.alpha, i);
      function gain(cost) { return gained / (cost + values.draft_cost * values.gamma); }
      function seconds(gpu, tokens, batch) {
        return Math.max(2 * model.weights * tokens * batch / gpu[0], 2 * model.weights / gpu[1]) +
          Math.max(model.attention * length * tokens * batch / gpu[0],
            model.cache * length * batch / gpu[1]);
      }
      function measured(tokens) {
        var high = data.measured.findIndex(function (pair) { return pair[0] >= tokens; });
        if (high < 0) return null;
        var above = data.measured[high], below = data.measured[Math.max(high - 1, 0)];
        return above[0] === tokens ? above[1] : below[1] +
          (above[1] - below[1]) * (tokens - below[0]) / (above[0] - below[0]);
      }
      data.gpus.forEach(function (gpu, n) {
        frame.data[n + 1].y = data.batches.map(function (batch) {
          return 2 * model.weights + batch * values.context * model.cache > data.room ? null
            : gain(seconds(gpu, values.gamma + 1, batch) / seconds(gpu, 1, batch));
        });
      });
      frame.data[3].y = data.batches.map(function (batch) {
        var cost = measured(batch * (values.gamma + 1));
        return cost === null ? null : gain(cost / measured(batch));
      });
      var here = [1, 2, 3].map(function (n) { return frame.data[n].y[place]; });
      frame.data[4].x = [rows, rows, rows];
      frame.data[4].y = here;
      function told(value) { return value === null ? "none" : (value + 1e-9).toFixed(2) + "x"; }
      frame.layout.title.text = "Batch " + rows + ": H100 " + told(here[0]) + ", A100 " +
        told(here[1]);
      frame.layout.yaxis.range = [0, Math.max(2, 1.1 * gained)];
    },
    attentionDesigner: function (values, data, frame) {
      var need = data.tiles[[values.target, values.head_dim, values.rows, values.columns,
        values.stages, values.warps].join(" ")];
      var limit = data.limits[values.target], bar = frame.data[0];
      function kib(bytes) { return Math.floor(bytes / 1024); }
      function color(over) { return over ? "#D55E00" : "#0072B2"; }
      bar.x = [100 * need.formula / limit, 100 * need.shared / limit,
        need.spills ? 130 : 100 * need.registers / 255];
      bar.text = [kib(need.formula) + " KiB", kib(need.shared) + " KiB",
        need.spills ? "spill" : String(need.registers)];
      bar.marker.color = [color(need.formula > limit), color(need.shared > limit),
        color(need.spills)];
      var room = kib(need.shared) + " of " + kib(limit) + " KiB";
      frame.layout.title.text = need.shared > limit ? "Too large: " + room
        : need.spills ? "Registers spill: " + need.spills.toLocaleString("en-US") + " bytes"
          : "Fits: " + room + ", " + need.registers + " registers";
      frame.layout.xaxis.title.text = "% of the limit<br>requests a byte per " +
        values.rows + " FLOP;<br>HBM delivers one per " + Math.round(data.needed[values.target]);
    },
    // Two runs of labcore.studies.inflight.rivals: five kinds of bars and the blocks held, for each.
    inflightRivals: function (values, data, frame) {
      var setting = [values.load, values.pool, values.budget,
        Math.min(values.chunk, values.budget)].join(" ");
      var wide = data.widths[setting];
      ["", 2, 3, 4].forEach(function (end) { frame.layout["xaxis" + end].range = [0, wide]; });
      [values.first, values.second].forEach(function (name, n) {
        var run = data.runs[name + " " + setting], held = run[1];
        for (var kind = 0; kind < 5; kind += 1) {
          var x = [], y = [];
          run[0].forEach(function (bar) {
            if (bar[0] !== kind) return;
            x.push(bar[2] / 1e4, bar[3] / 1e4, null);
            y.push(bar[1] + 1, bar[1] + 1, null);
          });
          frame.data[6 * n + kind].x = x.length ? x : [null];
          frame.data[6 * n + kind].y = x.length ? y : [null];
        }
        frame.data[6 * n + 5].x = held.map(function (one) { return one[0] / 1e4; })
          .concat(run[2] / 1e4);
        frame.data[6 * n + 5].y = held.concat([held[held.length - 1]])
          .map(function (one) { return one[1]; });
        frame.layout["yaxis" + (2 + 2 * n)].range = [0, values.pool];
        frame.layout.annotations[n].text = run[3];
      });
    }
  };
})();
