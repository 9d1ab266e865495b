// Draws the slot timeline of a report on a canvas: tens of thousands of slices.
"use strict";
(() => {
  const { report, theme, FONT, painters } = page;
  const WHOLE = 1e6; // times are in millionths of the run
  const canvas = document.getElementById("slots");
  const tip = document.querySelector(".tip");
  const LEFT = 48, RIGHT = 12, TOP = 8, BOTTOM = 40;

  function unpacked(source) {
    if (!source.grid.length) return source;
    const run = { ...source, slot: [], start: [], end: [], rollout: null, made: null, version: null };
    const letters = [];
    source.grid.forEach((row, slot) => {
      const width = WHOLE / row.length;
      for (let i = 0; i < row.length; ) {
        let j = i + 1;
        while (j < row.length && row[j] === row[i]) j += 1;
        if (row[i] !== " ") {
          run.slot.push(slot);
          run.start.push(i * width);
          run.end.push(j * width);
          letters.push(row[i]);
        }
        i = j;
      }
    });
    run.outcomes = letters.join("");
    return run;
  }

  const unpackedRuns = report.timelines.map(() => null);
  const state = { index: 0, from: 0, to: WHOLE, top: 0, bottom: 1, drag: null };
  const current = () => (unpackedRuns[state.index] ??= unpacked(report.timelines[state.index]));

  function show(index) {
    state.index = index;
    const run = current();
    run.bySlot ??= run.slot.reduce((rows, slot, i) => (rows[slot].push(i), rows), Array.from({ length: run.slots }, () => []));
    reset();
  }

  function reset() {
    Object.assign(state, { from: 0, to: WHOLE, top: 0, bottom: current().slots });
    paint();
  }

  const area = () => ({ width: canvas.clientWidth - LEFT - RIGHT, height: canvas.clientHeight - TOP - BOTTOM });
  const timeAt = (x) => state.from + ((x - LEFT) / area().width) * (state.to - state.from);
  const slotAt = (y) => state.top + ((y - TOP) / area().height) * (state.bottom - state.top);

  function niceStep(span, most) {
    const rough = span / most;
    const power = 10 ** Math.floor(Math.log10(rough));
    return power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  }

  function paint() {
    const run = current();
    const t = theme();
    const ratio = window.devicePixelRatio || 1;
    const { width, height } = area();
    if (width <= 0) return;
    canvas.width = Math.round(canvas.clientWidth * ratio);
    canvas.height = Math.round(canvas.clientHeight * ratio);
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    const perTick = width / (state.to - state.from);
    const row = height / (state.bottom - state.top);
    pen.fillStyle = t.empty;
    pen.fillRect(LEFT, TOP, width, height);
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, TOP, width, height);
    pen.clip();
    const gapY = row > 4 ? 1 : 0;
    for (const [letter, color] of Object.entries(report.outcomeColors)) {
      pen.fillStyle = color;
      for (let i = 0; i < run.slot.length; i += 1) {
        if (run.outcomes[i] !== letter || run.end[i] < state.from || run.start[i] > state.to) continue;
        const x = LEFT + (run.start[i] - state.from) * perTick;
        const wide = (run.end[i] - run.start[i]) * perTick;
        pen.fillRect(x, TOP + (run.slot[i] - state.top) * row, Math.max(0.6, wide - (wide > 5 ? 0.7 : 0)), row - gapY);
      }
    }
    const marks = run.updates.filter((at) => at >= state.from && at <= state.to);
    if (marks.length < width / 6) {
      pen.fillStyle = t.ink;
      pen.globalAlpha = 0.55;
      marks.forEach((at) => pen.fillRect(LEFT + (at - state.from) * perTick - 0.5, TOP, 1, height));
      pen.globalAlpha = 1;
    }
    if (state.drag) {
      const { x, y, toX, toY, both } = state.drag;
      pen.fillStyle = t.ink;
      pen.globalAlpha = 0.2;
      pen.fillRect(Math.min(x, toX), both ? Math.min(y, toY) : TOP, Math.abs(toX - x), both ? Math.abs(toY - y) : height);
      pen.globalAlpha = 1;
    }
    pen.restore();
    paintAxes(pen, run, t, width, height, row);
  }

  function paintAxes(pen, run, t, width, height, row) {
    pen.font = `12px ${FONT}`;
    pen.fillStyle = t.muted;
    pen.strokeStyle = t.line;
    pen.textAlign = "center";
    pen.textBaseline = "top";
    const scale = run.duration / WHOLE;
    const step = niceStep((state.to - state.from) * scale, Math.max(2, width / 90));
    const digits = Math.max(0, -Math.floor(Math.log10(step)));
    for (let n = Math.ceil((state.from * scale) / step); n * step <= state.to * scale + 1e-9; n += 1) {
      const x = LEFT + ((n * step) / scale - state.from) * (width / (state.to - state.from));
      pen.fillRect(x, TOP + height, 1, 4);
      pen.fillText((n * step).toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits }), x, TOP + height + 7);
    }
    pen.fillText(`time (${run.unit})`, LEFT + width / 2, TOP + height + 24);
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    const every = Math.max(1, niceStep(state.bottom - state.top, Math.max(2, height / 40)));
    for (let slot = Math.ceil(state.top / every) * every; slot < state.bottom; slot += every) {
      pen.fillText(String(slot), LEFT - 8, TOP + (slot - state.top + 0.5) * row);
    }
    pen.save();
    pen.translate(10, TOP + height / 2);
    pen.rotate(-Math.PI / 2);
    pen.textAlign = "center";
    pen.fillText("slot", 0, 0);
    pen.restore();
  }

  function zoom(factor, around = (state.from + state.to) / 2) {
    const span = Math.min(WHOLE, Math.max(50, (state.to - state.from) * factor));
    const share = (around - state.from) / (state.to - state.from);
    move(around - share * span, span);
  }

  function move(from, span = state.to - state.from) {
    state.from = Math.min(Math.max(0, from), WHOLE - span);
    state.to = state.from + span;
    paint();
  }

  function scroll(rows) {
    const span = state.bottom - state.top;
    state.top = Math.min(Math.max(0, state.top + rows), current().slots - span);
    state.bottom = state.top + span;
    paint();
  }

  const MOVES = {
    in: () => zoom(0.5),
    out: () => zoom(2),
    left: () => move(state.from - (state.to - state.from) / 4),
    right: () => move(state.from + (state.to - state.from) / 4),
    up: () => scroll(-Math.max(1, (state.bottom - state.top) / 8)),
    down: () => scroll(Math.max(1, (state.bottom - state.top) / 8)),
    reset,
  };
  const KEYS = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", 0: "reset", Escape: "reset" };

  document.querySelectorAll("[data-move]").forEach((button) =>
    button.addEventListener("click", () => MOVES[button.dataset.move]()),
  );
  canvas.addEventListener("keydown", (event) => {
    const isZoomed = state.bottom - state.top < current().slots;
    const name = KEYS[event.key] || (isZoomed && { ArrowUp: "up", ArrowDown: "down" }[event.key]);
    if (!name || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    MOVES[name]();
  });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.shiftKey) return; // otherwise the page scrolls as usual
    event.preventDefault();
    zoom(event.deltaY + event.deltaX > 0 ? 1.25 : 0.8, timeAt(event.offsetX));
  }, { passive: false });
  canvas.addEventListener("dblclick", reset);
  canvas.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "touch") return;
    canvas.setPointerCapture(event.pointerId);
    state.drag = { x: event.offsetX, y: event.offsetY, toX: event.offsetX, toY: event.offsetY, both: false };
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!state.drag) return hover(event);
    tip.hidden = true;
    Object.assign(state.drag, { toX: event.offsetX, toY: event.offsetY, both: Math.abs(event.offsetY - state.drag.y) > 30 });
    paint();
  });
  canvas.addEventListener("pointerup", () => {
    const drag = state.drag;
    state.drag = null;
    if (drag && Math.abs(drag.toX - drag.x) > 5) {
      const [low, high] = [timeAt(Math.min(drag.x, drag.toX)), timeAt(Math.max(drag.x, drag.toX))];
      if (drag.both) {
        const [top, bottom] = [slotAt(Math.min(drag.y, drag.toY)), slotAt(Math.max(drag.y, drag.toY))];
        state.top = Math.max(0, Math.floor(top));
        state.bottom = Math.min(current().slots, Math.max(state.top + 2, Math.ceil(bottom)));
      }
      state.from = Math.max(0, low);
      state.to = Math.min(WHOLE, Math.max(state.from + 50, high));
    }
    paint();
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });

  function sliceAt(x, y) {
    const run = current();
    const slot = Math.floor(slotAt(y));
    const at = timeAt(x);
    if (slot < 0 || slot >= run.slots || x < LEFT || y < TOP) return -1;
    return run.bySlot[slot].find((i) => run.start[i] <= at && at <= run.end[i]) ?? -1;
  }

  function hover(event) {
    const i = sliceAt(event.offsetX, event.offsetY);
    tip.hidden = i < 0;
    if (i < 0) return;
    const run = current();
    const scale = run.duration / WHOLE;
    const time = (tick) => (tick * scale).toPrecision(5).replace(/\.?0+$/, "");
    const lines = [`slot ${run.slot[i]} · ${report.outcomes[run.outcomes[i]]}`, `${time(run.start[i])} to ${time(run.end[i])} ${run.unit}`];
    if (run.rollout) lines.unshift(`rollout ${run.rollout[i]} · ${run.made[i].toLocaleString("en-US")} tokens · version ${run.version[i]}`);
    tip.textContent = lines.join("\n");
    tip.style.left = `${Math.min(event.offsetX + 14, canvas.clientWidth - tip.offsetWidth - 4)}px`;
    tip.style.top = `${Math.min(event.offsetY + 14, canvas.clientHeight - tip.offsetHeight)}px`;
  }

  const select = document.getElementById("timeline-run");
  if (select) select.addEventListener("change", () => show(Number(select.value)));

  painters.push(paint);
  new ResizeObserver(() => paint()).observe(canvas);
  if (report.timelines.length) show(0);
})();
