// anywidget drops every message to a model that was not ready within two seconds. On a busy page
// plotly's code takes longer, and so may any other module. This one loads the code once for the
// page and passes the model's messages to Jupyter's own queue, which waits for the code.
const loaded = (globalThis.labcorePlotly ??= new Map());

function plotly(code) {
  if (!loaded.has(code)) {
    const address = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
    loaded.set(code, import(address));
  }
  return loaded.get(code);
}

export default () => {
  let figure;
  return {
    initialize({ model }) {
      figure = plotly(model.get("_plotly")).then(({ default: make }) => {
        const widget = make();
        widget.initialize({ model });
        return widget;
      });
      // anywidget wraps the model; Backbone's set returns it unwrapped. AnyModel extends base.
      const whole = model.set({});
      const base = Object.getPrototypeOf(Object.getPrototypeOf(whole));
      whole.state_change = whole.state_change.then(() => figure);
      whole.comm?.on_msg((message) => base._handle_comm_msg.call(whole, message));
    },
    async render(view) {
      return (await figure).render(view);
    },
  };
};
