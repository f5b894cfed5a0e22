// Guesses and answers, kept in this browser alone; the heads of chapters and the index show them.
(function () {
  "use strict";
  var KEY = "labcore.progress";
  var head = document.querySelector(".labcore-chapter[data-slug]");
  var slug = head && head.dataset.slug;
  var asked = [0, 0];  // guesses and questions of this page

  function all() {
    try { return JSON.parse(localStorage.getItem(KEY)) || {}; } catch (error) { return {}; }
  }

  function mine() { return all()[slug] || { guesses: {}, right: {} }; }

  function keep(change) {
    var every = all(), own = mine();
    own.asked = asked;
    change(own);
    every[slug] = own;
    try { localStorage.setItem(KEY, JSON.stringify(every)); } catch (error) { /* nothing is kept */ }
    show();
  }

  // The entries whose question is on the page.
  function still(kept, before, after) {
    var found = {};
    Object.keys(kept).forEach(function (key) {
      if (document.querySelector(before + key + after)) found[key] = kept[key];
    });
    return found;
  }

  function count(own) { return [Object.keys(own.guesses).length, Object.keys(own.right).length]; }

  function said(done, of) {
    return done[0] + " of " + of[0] + " guesses made, " + done[1] + " of " + of[1] +
      " questions answered";
  }

  function show() {
    document.querySelectorAll(".labcore-progress").forEach(function (line) {
      var every = all(), slugs = line.dataset.course === undefined ? [slug] : Object.keys(every);
      var done = [0, 0], of = [0, 0];
      slugs.filter(function (name) { return every[name]; }).forEach(function (name) {
        count(every[name]).forEach(function (one, place) {
          done[place] += one;
          of[place] += every[name].asked[place];
        });
      });
      line.hidden = !(done[0] + done[1]);
      line.firstElementChild.textContent = (line.dataset.course === undefined ? "" :
        "In " + slugs.length + (slugs.length === 1 ? " chapter: " : " chapters: ")) + said(done, of);
    });
  }

  function short(value) { return String(Number(value.toPrecision(3))); }

  // The same sentence as labcore.ui's Reveal.
  function compare(guess, measured, unit) {
    var line = "You said " + (short(guess) + " " + unit).trim() + ".";
    if (guess === measured) return line + " The same.";
    if (guess * measured > 0) {
      return line + " Your guess was " + (Math.abs(guess) > Math.abs(measured) ? "above" : "below") +
        " by a factor of " + short(Math.max(guess / measured, measured / guess)) + ".";
    }
    return line + " Your guess was off by " + (short(Math.abs(guess - measured)) + " " + unit).trim() + ".";
  }

  function guessed(uid, guess) {
    document.querySelectorAll('[data-reveal="' + uid + '"]').forEach(function (fold) {
      fold.querySelector("[role=status]").textContent =
        compare(guess, Number(fold.dataset.measured), fold.dataset.unit);
    });
  }

  function ready() {
    var forms = document.querySelectorAll("form.labcore-predict");
    forms.forEach(function (form) {
      var field = form.querySelector("input"), status = form.querySelector("[role=status]");
      var kept = mine().guesses[form.dataset.predict];
      form.querySelector("[hidden]").hidden = false;
      if (kept !== undefined) { field.value = kept; guessed(form.dataset.predict, kept); }
      form.addEventListener("submit", function (event) {
        event.preventDefault();
        if (field.value === "" || !isFinite(field.value)) {
          status.textContent = "A guess is a number, such as 0.5 or 1e6.";
          return;
        }
        keep(function (own) { own.guesses[form.dataset.predict] = Number(field.value); });
        guessed(form.dataset.predict, Number(field.value));
        status.textContent = "Kept. Read on to the measurement.";
      });
    });
    document.querySelectorAll(".labcore-quiz fieldset").forEach(function (question) {
      question.addEventListener("change", function (event) {
        if (event.target.value === question.dataset.answer) {
          keep(function (own) { own.right[event.target.name] = true; });
        }
      });
    });
    document.querySelectorAll(".labcore-progress button").forEach(function (button) {
      button.addEventListener("click", function () {
        localStorage.removeItem(KEY);
        location.reload();
      });
    });
    asked = [forms.length, document.querySelectorAll(".labcore-quiz fieldset").length];
    if (all()[slug]) keep(function (own) { // the page may have changed since
      own.guesses = still(own.guesses, "form[data-predict='", "']");
      own.right = still(own.right, ".labcore-quiz input[name='", "']");
    });
    show();
  }

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", ready);
  else ready();
})();
