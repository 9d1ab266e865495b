// Draws the slot timeline of a report on a canvas: up to 12,000 slices.
"use strict";
(() => {
  const { report, theme, FONT, painters } = page;
  const WHOLE = 1e6; // times are in millionths of what is shown
  const LEFT = 48, RIGHT = 12, TOP = 8, BOTTOM = 40;
  const canvas = document.getElementById("slots");
  const tip = document.querySelector(".tip");
  const select = document.getElementById("timeline-run");
  const state = { from: 0, to: WHOLE, drag: null };
  const current = () => report.timelines[Number(select.value)];
  const width = () => canvas.clientWidth - LEFT - RIGHT;
  const height = () => canvas.clientHeight - TOP - BOTTOM;
  const timeAt = (x) => state.from + ((x - LEFT) / width()) * (state.to - state.from);
  const placeOf = (time) => LEFT + ((time - state.from) / (state.to - state.from)) * width();

  function niceStep(span, most) {
    const power = 10 ** Math.floor(Math.log10(span / most));
    return power * [1, 2, 5, 10].find((factor) => factor * power >= span / most);
  }

  function paint() {
    const run = current(), t = theme(), ratio = window.devicePixelRatio || 1, row = height() / run.slots;
    if (width() <= 0) return;
    canvas.width = Math.round(canvas.clientWidth * ratio);
    canvas.height = Math.round(canvas.clientHeight * ratio);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, TOP, width(), height());
    pen.clip();
    pen.fillStyle = t.empty;
    pen.fillRect(LEFT, TOP, width(), height());
    run.slot.forEach((slot, i) => {
      if (run.end[i] < state.from || run.start[i] > state.to) return;
      const x = placeOf(run.start[i]), wide = placeOf(run.end[i]) - x;
      pen.fillStyle = report.outcomes[run.outcomes[i]][1];
      pen.fillRect(x, TOP + slot * row, Math.max(0.6, wide - (wide > 5 ? 0.7 : 0)), row - (row > 4 ? 1 : 0));
    });
    pen.fillStyle = t.ink;
    const marks = run.updates.filter((at) => at >= state.from && at <= state.to);
    pen.globalAlpha = 0.55;
    if (marks.length < width() / 6) marks.forEach((at) => pen.fillRect(placeOf(at) - 0.5, TOP, 1, height()));
    pen.globalAlpha = 0.2;
    if (state.drag) pen.fillRect(state.drag.x, TOP, state.drag.to - state.drag.x, height());
    pen.restore();
    paintAxes(pen, run, t, row);
  }

  function paintAxes(pen, run, t, row) {
    pen.font = `12px ${FONT}`;
    pen.fillStyle = t.muted;
    pen.textAlign = "center";
    const scale = run.duration / WHOLE;
    const step = niceStep((state.to - state.from) * scale, Math.max(2, width() / 90));
    const digits = Math.max(0, -Math.floor(Math.log10(step)));
    for (let n = Math.ceil((state.from * scale) / step); n * step <= state.to * scale + 1e-9; n += 1) {
      const x = placeOf((n * step) / scale);
      pen.fillRect(x, TOP + height(), 1, 4);
      pen.fillText((n * step).toFixed(digits), x, TOP + height() + 17);
    }
    pen.fillText(`time (${run.unit})`, LEFT + width() / 2, TOP + height() + 34);
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    const every = Math.max(1, niceStep(run.slots, Math.max(2, height() / 40)));
    for (let slot = 0; slot < run.slots; slot += every) pen.fillText(slot ? slot : "slot 0", LEFT - 6, TOP + (slot + 0.5) * row);
  }

  function show(from, to) {
    const span = Math.min(WHOLE, Math.max(50, to - from));
    state.from = Math.min(Math.max(0, from), WHOLE - span);
    state.to = state.from + span;
    paint();
  }

  function zoom(factor, around = (state.from + state.to) / 2) {
    show(around + (state.from - around) * factor, around + (state.to - around) * factor);
  }

  function move(by) {
    const step = by * (state.to - state.from);
    show(state.from + step, state.to + step);
  }

  const all = () => show(0, WHOLE);
  const KEYS = { "+": () => zoom(0.5), "-": () => zoom(2), ArrowLeft: () => move(-0.25), ArrowRight: () => move(0.25), 0: all };
  document.querySelectorAll("[data-key]").forEach((button) => button.addEventListener("click", () => KEYS[button.dataset.key]()));
  canvas.addEventListener("keydown", (event) => {
    if (!KEYS[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  canvas.addEventListener("dblclick", all);
  canvas.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "touch") return;
    canvas.setPointerCapture(event.pointerId);
    state.drag = { x: event.offsetX, to: event.offsetX };
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!state.drag) return hover(event);
    tip.hidden = true;
    state.drag.to = event.offsetX;
    paint();
  });
  canvas.addEventListener("pointerup", () => {
    const drag = state.drag;
    state.drag = null;
    if (drag && Math.abs(drag.to - drag.x) > 5) show(timeAt(Math.min(drag.x, drag.to)), timeAt(Math.max(drag.x, drag.to)));
    else paint();
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  select.addEventListener("change", all);

  function hover({ offsetX, offsetY }) {
    const run = current(), at = timeAt(offsetX), slot = Math.floor(((offsetY - TOP) / height()) * run.slots);
    const i = offsetX < LEFT ? -1 : run.slot.findIndex((one, j) => one === slot && run.start[j] <= at && at <= run.end[j]);
    tip.hidden = i < 0;
    if (i < 0) return;
    const time = (tick) => Number(((tick * run.duration) / WHOLE).toPrecision(5));
    tip.textContent = `rollout ${run.rollout[i]} · ${run.made[i].toLocaleString("en-US")} tokens · version ${run.version[i]}
slot ${slot} · ${report.outcomes[run.outcomes[i]][0]}\n${time(run.start[i])} to ${time(run.end[i])} ${run.unit}`;
    tip.style.left = `${Math.min(offsetX + 14, canvas.clientWidth - tip.offsetWidth - 4)}px`;
    tip.style.top = `${Math.min(offsetY + 14, canvas.clientHeight - tip.offsetHeight)}px`;
  }

  painters.push(paint);
  new ResizeObserver(paint).observe(canvas);
})();
