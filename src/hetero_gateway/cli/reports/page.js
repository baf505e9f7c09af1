"use strict";
const root = document.documentElement;
const config = {responsive: true, displaylogo: false, modeBarButtonsToRemove: ["lasso2d", "select2d"]};

// What the theme decides, in the dotted form that relayout takes.
const themed = () => {
  const style = getComputedStyle(root);
  const value = (name) => style.getPropertyValue(name).trim();
  const layout = {
    paper_bgcolor: value("--surface"), plot_bgcolor: value("--surface"),
    "font.color": value("--ink"), "legend.bgcolor": "rgba(0,0,0,0)",
    "hoverlabel.bgcolor": value("--bg"), "hoverlabel.bordercolor": value("--line"),
    "hoverlabel.font.color": value("--ink"), "modebar.bgcolor": "rgba(0,0,0,0)",
    "modebar.color": value("--muted"), "modebar.activecolor": value("--ink"),
  };
  for (const axis of ["xaxis", "yaxis"]) {
    layout[`${axis}.gridcolor`] = value("--line");
    layout[`${axis}.zerolinecolor`] = value("--line");
    layout[`${axis}.linecolor`] = value("--line");
  }
  return layout;
};
const draw = async (id, figure) => {
  const layout = {
    margin: {l: 64, r: 16, t: 36, b: 48}, legend: {orientation: "h", yanchor: "top", y: -0.28},
    font: {family: getComputedStyle(document.body).fontFamily, size: 13},
    bargap: 0.25, ...figure.layout,
  };
  await Plotly.react(id, figure.data, layout, config);
  await Plotly.relayout(id, themed());
};
// Draws the plots with these ids in the system's theme, and again when it or the button changes.
const startPage = (plots, drawAll) => {
  const button = document.getElementById("theme");
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const setTheme = (dark) => {
    root.dataset.theme = dark ? "dark" : "light";
    button.textContent = dark ? "Light" : "Dark";
  };
  setTheme(system.matches);
  const drawn = drawAll();
  const retheme = async (dark) => {
    setTheme(dark);
    await drawn;
    for (const id of plots) Plotly.relayout(id, themed());
  };
  button.addEventListener("click", () => retheme(root.dataset.theme !== "dark"));
  system.addEventListener("change", (event) => retheme(event.matches));
};
