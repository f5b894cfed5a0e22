// Only the course's own server sends this: "Run this page", and a line while the book is rebuilt.
(() => {
  "use strict";
  const script = document.currentScript;
  const here = new URL(".", script.src);
  const notebook = script.dataset.notebook;

  async function ask(path, body) {
    const options = { credentials: "same-origin" };
    if (body) {
      const cookie = document.cookie.match(/(?:^|; )_xsrf=([^;]*)/);
      options.method = "POST";
      options.body = JSON.stringify(body);
      options.headers = { "Content-Type": "application/json", "X-XSRFToken": cookie ? cookie[1] : "" };
    }
    const answer = await fetch(new URL(path, here), options);
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    return answer.json();
  }

  function place() {
    let box = document.getElementById("labcore-run");
    if (!box) {
      box = document.createElement("div");
      box.id = "labcore-run";
      // The theme keeps a second, hidden title for printing.
      const title = [...document.querySelectorAll("h1")].find((h) => h.offsetParent !== null);
      if (title) title.after(box);
      else document.body.prepend(box);
    }
    box.hidden = false;
    return box;
  }

  function add(box, tag, text, action) {
    const element = document.createElement(tag);
    element.textContent = text;
    if (tag === "button") {
      element.type = "button";
      element.className = "labcore-run-button";
      element.addEventListener("click", action);
    }
    box.append(element, " ");
    return element;
  }

  // The tab opens with the click itself: a browser blocks one that opens after an answer.
  async function openCopy(box, fresh) {
    const tab = window.open("about:blank", "_blank");
    try {
      const made = await ask("copy", { notebook, fresh });
      const address = new URL(made.open, location.href);
      if (tab) tab.location.href = address.href;
      else location.href = address.href;
      await show(box);
    } catch (error) {
      if (tab) tab.close();
      add(box, "p", `No copy was opened: ${error.message}. Is the course still running?`).role = "alert";
    }
  }

  async function show(box) {
    const state = await ask(`copy?notebook=${encodeURIComponent(notebook)}`);
    box.replaceChildren();
    if (!state.copy || !state.changed) {
      add(box, "button", "Run this page", () => openCopy(box, false));
      const text = state.copy ? `opens your copy, ${state.copy}` : "opens a copy of your own under my/";
      add(box, "span", text);
      return;
    }
    const kind = notebook.startsWith("labs/") ? "lab" : "chapter";
    add(box, "p", `This ${kind} changed after your copy ${state.copy} was made.`);
    add(box, "button", "Open mine", () => openCopy(box, false));
    add(box, "button", "See the differences", () =>
      window.open(new URL(`differences?notebook=${encodeURIComponent(notebook)}`, here), "_blank"));
    add(box, "button", "Make a fresh copy beside it", () => openCopy(box, true));
  }

  // What was passed in the copies of the labs: a chapter's own, and on the first page all.
  async function labs() {
    const found = await ask("labs");
    const course = document.querySelector(".labcore-progress[data-course]");
    const slug = (notebook || "").split("/").pop().replace(/\.ipynb$/, "");
    const lines = document.createElement("div");
    if (course) {
      course.after(lines);
      Object.keys(found).forEach((lab) => add(lines, "p", `Lab ${lab}: ${found[lab]}`));
    } else if (found[slug]) {
      place().after(lines);
      add(lines, "p", `Your copy of the lab: ${found[slug]}`);
    }
  }

  function style() {
    const sheet = document.createElement("style");
    sheet.textContent = `
      #labcore-run { margin: .75rem 0 1.25rem; }
      .labcore-run-button { font: inherit; padding: .35rem .9rem; border-radius: .3rem; cursor: pointer;
        color: var(--pst-color-text-base, CanvasText); background: var(--pst-color-surface, Canvas);
        border: 1px solid var(--pst-color-primary, currentColor); margin: 0 .3rem .3rem 0; }
      .labcore-run-button:hover { text-decoration: underline; }
      #labcore-rebuild { position: fixed; right: 1rem; bottom: 1rem; padding: .4rem .8rem; z-index: 1100;
        color: var(--pst-color-text-base, CanvasText); background: var(--pst-color-surface, Canvas);
        border: 1px solid var(--pst-color-border, currentColor); border-radius: .3rem; }`;
    document.head.append(sheet);
  }

  async function watch(before) {
    const now = await ask("progress");
    let line = document.getElementById("labcore-rebuild");
    if (!line && now.state !== "ready") {
      line = document.createElement("div");
      line.id = "labcore-rebuild";
      line.role = "status";
      document.body.append(line);
    }
    if (now.state === "building") {
      line.textContent = `The book is being rebuilt: page ${now.page} of ${now.pages}`;
      setTimeout(() => watch("building").catch(() => line.remove()), 3000);
    } else if (now.state === "failed") {
      line.textContent = "The rebuild failed: this is the last book that was built";
    } else if (line && before === "building") {
      line.replaceChildren("The book was rebuilt. ");
      add(line, "button", "Show it", () => location.reload());
    }
  }

  function begin() {
    style();
    if (notebook) show(place()).catch(() => place().remove());
    labs().catch(() => undefined);
    watch("").catch(() => undefined);
  }
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", begin);
  else begin();
})();
