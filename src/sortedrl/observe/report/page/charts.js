// Draws the charts of a page with plotly, in its light or dark theme. All numbers come from #report-data; no metric is
// computed here.
"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("report-data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const LIGHT = { ink: "#1c2228", muted: "#5b6670", grid: "#e4e7eb", line: "#c9cfd6", paper: "#ffffff" };
  const DARK = { ink: "#e4e8ec", muted: "#9aa5af", grid: "#2a323a", line: "#434d57", paper: "#14181d" };
  const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
  const CONFIG = { responsive: true, displaylogo: false, modeBarButtons: [["zoomIn2d", "zoomOut2d", "resetScale2d", "toImage"]] }; // no upload
  const CLEAR = "rgba(0,0,0,0)";
  let view = null;

  function draw({ id, height, views }) {
    const { data, layout } = views[view] || Object.values(views)[0];
    const t = dark.matches ? DARK : LIGHT;
    const font = { family: FONT, size: 12, color: t.ink };
    const axis = (own) => ({
      gridcolor: t.grid, zerolinecolor: t.grid, linecolor: t.line, tickcolor: t.line, showline: true, ticks: "outside",
      ticklen: 4, separatethousands: true, exponentformat: "e", automargin: true, ...own,
      title: { ...own.title, font: { size: 12, color: t.muted }, standoff: 8 },
    });
    return Plotly.react(id, data, {
      hovermode: "x", ...layout, height, autosize: true, font,
      xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis), paper_bgcolor: CLEAR, plot_bgcolor: CLEAR,
      margin: { l: 56, r: 12, t: layout.showlegend === false ? 8 : 30, b: 44 },
      legend: { orientation: "h", x: 0, y: 1.01, yanchor: "bottom", bgcolor: CLEAR },
      hoverlabel: { bgcolor: t.paper, bordercolor: t.line, font },
      modebar: { bgcolor: CLEAR, color: t.muted, activecolor: t.ink },
    }, CONFIG);
  }

  dark.addEventListener("change", () => charts.forEach(draw));
  document.querySelectorAll('input[name="view"]').forEach((radio) =>
    radio.addEventListener("change", () => {
      view = radio.value;
      charts.filter((chart) => view in chart.views).forEach(draw);
    }),
  );

  // One chart at a time, so that the page stays responsive
  const waiting = [...charts];
  function next() {
    if (waiting.length) {
      draw(waiting.shift());
      setTimeout(next);
    } else {
      document.documentElement.dataset.ready = String(Math.round(performance.now()));
    }
  }
  setTimeout(next);
})();
