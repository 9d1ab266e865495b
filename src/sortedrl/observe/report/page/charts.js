// Draws the charts of a page with plotly, in its light or dark theme. All numbers come from #report-data; no metric is
// computed here. `page` is for the other scripts of the page.
"use strict";
const page = (() => {
  const report = JSON.parse(document.getElementById("report-data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const LIGHT = { ink: "#1c2228", muted: "#5b6670", grid: "#e4e7eb", line: "#c9cfd6", paper: "#ffffff", empty: "#eef0f3" };
  const DARK = { ink: "#e4e8ec", muted: "#9aa5af", grid: "#2a323a", line: "#434d57", paper: "#14181d", empty: "#20272e" };
  const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
  let printing = false;
  let view = null;
  const theme = () => (dark.matches && !printing ? DARK : LIGHT);

  // Charts

  const PRINT_WIDTH = 680, PRINT_WIDTH_OF_TWO = 330; // of report.css

  function width(id) {
    if (!printing) return undefined;
    return document.getElementById(id).closest(".grid") ? PRINT_WIDTH_OF_TWO : PRINT_WIDTH;
  }

  const CONFIG = {
    responsive: true,
    displaylogo: false,
    displayModeBar: "hover",
    modeBarButtons: [["toImage", "resetScale2d"]], // no button that uploads the chart
  };

  function themed(layout, size) {
    const t = theme();
    const axis = (own) => ({
      gridcolor: t.grid, zerolinecolor: t.grid, linecolor: t.line, tickcolor: t.line, showline: true, ticks: "outside",
      ticklen: 4, separatethousands: true, exponentformat: "e", automargin: true, ...own,
      title: { ...own.title, font: { size: 12, color: t.muted }, standoff: 8 },
    });
    return {
      hovermode: "x", autosize: !size.width, ...layout, ...size,
      xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis),
      font: { family: FONT, size: 12, color: t.ink },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 56, r: 12, t: layout.showlegend === false ? 8 : 30, b: 44 },
      legend: { orientation: "h", x: 0, y: 1.01, yanchor: "bottom", bgcolor: "rgba(0,0,0,0)" },
      hoverlabel: { bgcolor: t.paper, bordercolor: t.line, font: { color: t.ink, family: FONT, size: 12 } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: t.muted, activecolor: t.ink },
      dragmode: "zoom",
    };
  }

  function shown(chart) {
    return chart.views[view] || Object.values(chart.views)[0];
  }

  function draw(chart) {
    const { data, layout } = shown(chart);
    return Plotly.react(chart.id, data, themed(layout, { height: chart.height, width: width(chart.id) }), CONFIG);
  }

  const drawAll = () => report.charts.forEach(draw);

  // The numbers behind a chart, as a table that is filled when opened

  function fillTable(details) {
    const chart = report.charts.find((one) => one.id === details.dataset.chart);
    const { data, layout } = shown(chart);
    const across = data[0] && data[0].orientation === "h";
    const places = (trace) => (across ? trace.y : trace.x);
    const values = (trace) => (across ? trace.x : trace.y);
    const title = (across ? "run" : layout.xaxis.title.text) || "";
    const same = data.every((trace) => JSON.stringify(places(trace)) === JSON.stringify(places(data[0])));
    const head = same ? [title, ...data.map((trace) => trace.name)] : ["series", title, layout.yaxis.title.text];
    const rows = same
      ? places(data[0] || { x: [], y: [] }).map((place, i) => [place, ...data.map((trace) => values(trace)[i])])
      : data.flatMap((trace) => places(trace).map((place, i) => [trace.name, place, values(trace)[i]]));
    const table = document.createElement("table");
    const line = (cells, tag) => {
      const row = document.createElement("tr");
      cells.forEach((cell) => {
        const element = document.createElement(tag);
        element.textContent = typeof cell === "number" ? String(Number(cell.toPrecision(6))) : cell;
        row.append(element);
      });
      return row;
    };
    table.createTHead().append(line(head, "th"));
    table.createTBody().append(...rows.map((row) => line(row, "td")));
    details.querySelector(".scroll").replaceChildren(table);
  }

  document.querySelectorAll("details.numbers").forEach((details) =>
    details.addEventListener("toggle", () => details.open && fillTable(details)),
  );
  document.querySelectorAll('input[name="view"]').forEach((radio) =>
    radio.addEventListener("change", () => {
      view = radio.value;
      report.charts.filter((chart) => view in chart.views).forEach((chart) => {
        draw(chart);
        const details = document.querySelector(`details[data-chart="${chart.id}"]`);
        if (details.open) fillTable(details);
      });
    }),
  );

  // Tables that are wider than the window: a hint, and a fade at the edge where columns are cut off

  document.querySelectorAll(".scroll").forEach((box) => {
    const hint = document.createElement("p");
    hint.className = "more";
    hint.textContent = "More columns: scroll sideways →";
    box.after(hint);
    function check() {
      const beyond = box.scrollWidth - box.clientWidth;
      hint.hidden = beyond <= 1;
      box.classList.toggle("is-cut", beyond - box.scrollLeft > 1);
    }
    check();
    box.addEventListener("scroll", check);
    new ResizeObserver(check).observe(box);
  });

  // Theme, print

  const painters = [drawAll];
  const paintAll = () => painters.forEach((paint) => paint());
  dark.addEventListener("change", paintAll);
  window.addEventListener("beforeprint", () => { printing = true; paintAll(); });
  window.addEventListener("afterprint", () => { printing = false; paintAll(); });

  // One chart at a time, so that the page stays responsive

  const waiting = [...report.charts];
  function next() {
    const chart = waiting.shift();
    if (!chart) {
      document.documentElement.dataset.ready = String(Math.round(performance.now()));
      return;
    }
    draw(chart);
    setTimeout(next);
  }
  setTimeout(next);
  return { report, theme, FONT, painters };
})();
