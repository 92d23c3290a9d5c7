/* The page to play with: what twins.js computes, drawn, with controls. Builds itself in every <div class="twinplay">.
 *
 * A run is a function of the settings alone, so all steps are computed at once and `step` only says how many are shown.
 * That makes the time line a slider, and lets the whole path move while one drags another slider.
 */
(() => {
  "use strict";

  const T = window.twinboot;
  const STEPS = 300; // of a run: the slowest direction of the valley settles in 200 at the default rate
  const SPEED = 40; // steps a second
  const REPEATS = 100; // the root mean square of sigma then has a standard error of 5 %
  const VIEW = { x: 2.1, y: 1.4 }; // the map shows weights from -x to x and from -y to y
  const LENS = 3.6; // half the width of the lens, in units of the theory's sigma
  const RANGE = [0.001, 2]; // of the axis of sigma

  const CHOICES = {
    landscape: { one: "One well", two: "Two wells", valley: "A valley" },
    reset: { sample: "sample", mean: "mean", centered: "centered", never: "never" },
  };
  const hundredths = (from, to, by) =>
    Array.from({ length: Math.round((to - from) / by) + 1 }, (_, k) => Math.round((from + k * by) * 100) / 100);
  const SLIDERS = {
    n: { label: "Data", hint: "samples, n", values: [5, 10, 15, 20, 30, 50, 70, 100, 150, 200, 300, 400] },
    noise: { label: "Noise", hint: "standard deviation of the data", values: hundredths(0.05, 0.6, 0.05) },
    lr: { label: "Learning rate", hint: "of gradient descent", values: hundredths(0.02, 0.4, 0.02) },
    every: { label: "Reset every", hint: "steps", values: [1, 2, 3, 5, 10, 15, 20, 30, 50, 75, 100, 150] },
  };
  const DEFAULTS = {
    landscape: "one", n: 30, noise: 0.3, lr: 0.1, reset: "sample", every: 50, seed: 4, start: [-1.4, 0.9],
  };
  const RIDGE = [0, 0.8]; // between the wells, where each twin's own data decide where it goes
  const PRESETS = [
    ["Plenty of data", { n: 300 }],
    ["Few data", { n: 5 }],
    ["No resets: the twins part", { landscape: "two", n: 50, reset: "never", every: 10, seed: 47, start: RIDGE }],
    ["Resets keep one basin", { landscape: "two", n: 50, every: 10, seed: 47, start: RIDGE }],
    ["A valley: slow to settle", { landscape: "valley", n: 100, noise: 0.2, reset: "never", seed: 3, start: [-0.6, 1.1] }],
    ["A reset to the mean", { n: 30, reset: "mean", every: 75 }],
  ];

  const ABOUT = {
    one: "Each dot is a datum, and pulls the weights to itself. The best weights are the mean of the data, and the " +
      "standard error of a mean is noise / √n.",
    two: "Each datum says where both wells are, so it is shown twice. Either well explains the data. The uncertainty " +
      "that one asks for is that inside a well, and not the distance between the two.",
    valley: "The data say three times less about the weights along the valley than across it. The truth is an ellipse. " +
      "With one σ for both weights, twins can only show a circle of the same mean square.",
  };
  const RESETS = {
    sample: (k) => `Every ${k} steps both twins are drawn anew from a normal distribution around their mean, with ` +
      "standard deviation σ. This is the paper's reset.",
    mean: (k) => `Every ${k} steps both twins are put at their mean. The next σ starts from 0 and grows again as their ` +
      "data pull them apart.",
    centered: (k) => `Every ${k} steps both twins are drawn anew at opposite sides of their mean, so that the mean ` +
      "does not move.",
    never: () => "The twins are never reset. Nothing brings them back together.",
  };

  const number = (x) => (x < 0.0005 ? "0" : x.toPrecision(2).replace(/^(\d)\.0$/, "$1"));
  const radios = (name) =>
    Object.entries(CHOICES[name]).map(([value, label]) =>
      `<label><input type="radio" name="twinplay-${name}" value="${value}"><span>${label}</span></label>`).join("");
  const slider = (name) =>
    `<label class="tp-slider"><span><b>${SLIDERS[name].label}</b> <i>${SLIDERS[name].hint}</i>` +
    `<span class="tp-value" data-of="${name}" aria-hidden="true"></span></span><input type="range" name="${name}" min="0" max="${SLIDERS[name].values.length - 1}" step="1"></label>`;

  const PAGE = `
    <div class="tp-presets" role="group" aria-label="Presets">
      ${PRESETS.map(([name], k) => `<button type="button" data-preset="${k}">${name}</button>`).join("")}
    </div>
    <p class="tp-about"></p>
    <div class="tp-grid">
      <div class="tp-stage">
        <canvas class="tp-map" tabindex="0" role="img"></canvas>
        <div class="tp-transport">
          <button type="button" class="tp-main" data-do="play">Play</button>
          <button type="button" data-do="step">Step</button>
          <button type="button" data-do="restart">Restart</button>
          <button type="button" data-do="data">New data</button>
          <label class="tp-time"><span class="tp-hidden">Step</span>
            <input type="range" name="step" min="0" max="${STEPS}" step="1"></label>
          <output data-of="step"></output>
        </div>
        <div class="tp-numbers">
          <div><span>σ of the twins</span><output data-of="sigma"></output></div>
          <div><span>σ by theory</span><output data-of="theory"></output></div>
          <div><span>ratio</span><output data-of="ratio"></output></div>
        </div>
        <ul class="tp-legend">
          <li><i class="tp-one"></i>twin 1, and data that only it drew</li>
          <li><i class="tp-two"></i>twin 2</li>
          <li><i class="tp-both"></i>drawn by both</li>
          <li><i class="tp-none"></i>by none</li>
          <li><i class="tp-ring"></i>σ around their mean</li>
          <li><i class="tp-ring tp-truth"></i>theory, around the true minimum</li>
          <li><i class="tp-ring tp-area"></i>area of the lens</li>
          <li><i class="tp-tri">▲</i>reset</li>
        </ul>
      </div>
      <div class="tp-side"><div class="tp-controls">
        <fieldset><legend>Landscape</legend><div class="tp-choice">${radios("landscape")}</div></fieldset>
        ${slider("n")}${slider("noise")}${slider("lr")}
        <fieldset><legend>Reset</legend><div class="tp-choice">${radios("reset")}</div></fieldset>
        ${slider("every")}
        <p class="tp-reset"></p>
        <button type="button" data-do="link">Copy link to this run</button>
      </div>
      <figure class="tp-lens">
        <canvas role="img"></canvas>
        <figcaption>Through a lens, at the true minimum (×).</figcaption>
      </figure></div>
      <figure class="tp-chart">
        <canvas role="img"></canvas>
        <figcaption><button type="button" data-do="repeat">Repeat with ${REPEATS} other data sets</button>
          <span class="tp-outcome" role="status"></span></figcaption>
      </figure>
    </div>`;

  function mount(root) {
    root.dataset.ready = "yes";
    root.innerHTML = PAGE;
    const find = (selector) => root.querySelector(selector);
    const inputs = (name) => [...root.querySelectorAll(`input[name="${name}"]`)];
    const output = (name, text) => { find(`[data-of="${name}"]`).textContent = text; };
    const [map, lens, chart] = [".tp-map", ".tp-lens canvas", ".tp-chart canvas"].map(find);
    const calm = matchMedia("(prefers-reduced-motion: reduce)");

    let settings = { ...DEFAULTS };
    let run, theory, colors, terrain;
    let step = 0;
    let playing = false;
    let touched = false; // the address changes only once the visitor has changed something
    let repeats = null; // { sigmas, fits, parted } of other data sets

    // ---- the state, in the address -------------------------------------------------------------------------------

    function address() {
      const { landscape, n, noise, lr, reset, every, seed, start } = settings;
      const all = { landscape, n, noise, lr, reset, every, seed, x: start[0], y: start[1], step };
      return "#" + Object.entries(all).map(([key, value]) => `${key}=${value}`).join("&");
    }

    function readAddress() {
      const given = new URLSearchParams(location.hash.slice(1));
      if (!given.has("landscape")) return false;
      const found = { ...DEFAULTS };
      for (const [name, values] of Object.entries(CHOICES)) if (given.get(name) in values) found[name] = given.get(name);
      for (const [name, { values }] of Object.entries(SLIDERS)) {
        const value = parseFloat(given.get(name));
        if (Number.isFinite(value)) found[name] = nearest(values, value);
      }
      const within = (name, most) => Math.max(-most, Math.min(most, parseFloat(given.get(name))));
      const start = [within("x", VIEW.x), within("y", VIEW.y)];
      if (start.every(Number.isFinite)) found.start = start;
      const whole = (name, most, usual) => Math.min(most, Math.max(0, parseInt(given.get(name), 10))) || usual;
      found.seed = whole("seed", 1e6, DEFAULTS.seed);
      settings = found;
      step = whole("step", STEPS, 0);
      return true;
    }

    const nearest = (values, value) =>
      values.reduce((best, v) => (Math.abs(v - value) < Math.abs(best - value) ? v : best));

    let later = 0;
    function keepAddress() { // browsers allow some dozen changes of the address a minute
      clearTimeout(later);
      later = setTimeout(() => root.isConnected && touched && history.replaceState(history.state, "", address()), 250);
    }

    // ---- a change of settings, and time --------------------------------------------------------------------------

    function change(what) {
      touched = true;
      settings = { ...settings, ...what };
      refresh();
    }

    function refresh() {
      repeats = null;
      run = T.run(settings, STEPS);
      theory = T.theory(settings.landscape, settings.noise, settings.n);
      for (const name of Object.keys(CHOICES)) {
        for (const input of inputs(`twinplay-${name}`)) input.checked = input.value === settings[name];
      }
      for (const [name, { values }] of Object.entries(SLIDERS)) {
        const [input] = inputs(name);
        input.value = values.indexOf(settings[name]);
        input.setAttribute("aria-valuetext", String(settings[name]));
        output(name, settings[name]);
      }
      inputs("every")[0].disabled = settings.reset === "never";
      find(".tp-about").textContent = ABOUT[settings.landscape];
      find(".tp-reset").textContent = RESETS[settings.reset](settings.every);
      root.querySelectorAll("[data-preset]").forEach((button, k) => {
        const preset = { ...DEFAULTS, ...PRESETS[k][1] };
        button.setAttribute("aria-pressed", Object.keys(preset).every((key) => `${preset[key]}` === `${settings[key]}`));
      });
      show();
    }

    function show() {
      const s = run.sigmas[step];
      inputs("step")[0].value = step;
      output("step", `step ${step}`);
      output("sigma", number(s));
      output("theory", number(theory));
      output("ratio", number(s / theory));
      const button = find('[data-do="play"]');
      button.textContent = playing ? "Pause" : "Play";
      button.setAttribute("aria-pressed", playing);
      if (!playing) {
        find(".tp-outcome").textContent = outcome();
        const place = T.middle(...run.twins[step]).map((w) => w.toFixed(2)).join(", ");
        map.setAttribute("aria-label", `Map: after ${step} steps the mean of the twins is at (${place}). ` +
          "The arrow keys or a click move the start.");
        lens.setAttribute("aria-label", `Lens: circles of sigma, ${number(s)}, and of theory, ${number(theory)}.`);
        chart.setAttribute("aria-label", `Chart: sigma over ${step} steps, ending at ${number(s)}.`);
        keepAddress();
      }
      draw();
    }

    function outcome() {
      if (repeats) return repeats.text;
      const { landscape, noise, lr, reset, every } = settings;
      if (step < 5) return "";
      if (T.apart(landscape, ...run.twins[step])) {
        return "The twins are in different wells. σ is now the distance between the wells, and not the uncertainty in one.";
      }
      const settled = Math.ceil(2 / (lr * Math.min(...T.landscapes[landscape].curvature(noise))));
      if (reset !== "never" && every < settled) {
        return `Twins need about ${settled} steps to settle here. Resets every ${every} steps come sooner, so σ tends to be too small.`;
      }
      if (step < settled) return `The twins need about ${settled} steps to settle.`;
      const extra = Math.round(100 * (T.feedback(landscape, noise, lr) - 1));
      if (extra >= 15) return `At this learning rate the noise on the weights makes σ about ${extra} % larger.`;
      return "One pair with two weights is a rough estimate: for two pairs in three, the ratio is between 0.4 and 1.35.";
    }

    let before = 0;
    function frame(now) {
      if (!playing || !root.isConnected) return;
      const due = Math.floor(((now - before) * SPEED) / 1000);
      if (due > 0) {
        before = now;
        step = Math.min(STEPS, step + Math.min(due, 10));
        playing = step < STEPS;
        show();
      }
      if (playing) requestAnimationFrame(frame);
    }

    function play() {
      if (playing) {
        playing = false;
        return show();
      }
      if (step >= STEPS) step = 0;
      if (calm.matches) { // no motion: the end at once
        step = STEPS;
        return show();
      }
      playing = true;
      before = performance.now();
      show();
      requestAnimationFrame(frame);
      return undefined;
    }

    function repeat() {
      const asked = settings;
      const found = { sigmas: [], fits: [], parted: 0, text: "" };
      playing = false;
      repeats = found;
      const some = () => { // a few at a time, so that the page stays awake
        if (repeats !== found || !root.isConnected) return;
        for (let k = 0; k < 5 && found.sigmas.length < REPEATS; k++) {
          const other = { ...asked, seed: asked.seed + 1000 + found.sigmas.length };
          const one = T.run(other, STEPS);
          found.sigmas.push(one.sigmas[STEPS]);
          found.fits.push(T.plain(other, one.data, STEPS));
          found.parted += T.apart(other.landscape, ...one.twins[STEPS]) ? 1 : 0;
        }
        const rms = Math.sqrt(found.sigmas.reduce((sum, s) => sum + s * s, 0) / found.sigmas.length);
        found.rms = rms;
        found.text = `${found.sigmas.length} data sets: root mean square of σ ${number(rms)}, theory ${number(theory)}.` +
          (asked.landscape === "two" ? ` In different wells: ${found.parted} pairs.` : "") +
          " Pink dots: where a plain fit to each of them ends.";
        if (found.sigmas.length < REPEATS) setTimeout(some, 0);
        show();
      };
      some();
    }

    // ---- pictures ------------------------------------------------------------------------------------------------

    function readColors() {
      const style = getComputedStyle(root);
      const color = (name) => style.getPropertyValue(`--tp-${name}`).trim();
      colors = {};
      for (const name of ["paper", "ink", "faint", "line", "low", "high", "one", "two", "truth"]) colors[name] = color(name);
      terrain = null;
      show();
    }

    // A canvas in CSS pixels, sharp on the screen; cleared.
    function prepare(canvas) {
      const scale = Math.min(2, window.devicePixelRatio || 1);
      const [width, height] = [canvas.clientWidth, canvas.clientHeight];
      if (canvas.width !== Math.round(width * scale)) canvas.width = Math.round(width * scale);
      if (canvas.height !== Math.round(height * scale)) canvas.height = Math.round(height * scale);
      const ctx = canvas.getContext("2d");
      ctx.setTransform(scale, 0, 0, scale, 0, 0);
      ctx.clearRect(0, 0, width, height);
      ctx.lineJoin = ctx.lineCap = "round";
      ctx.font = "12px system-ui, sans-serif";
      return { ctx, width, height };
    }

    function draw() {
      if (!colors || !map.clientWidth) return;
      drawMap();
      drawLens();
      drawChart();
    }

    const rgb = (hex) => [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16));

    // The expected loss as shades with contour lines; computed anew only when it looks different.
    function drawTerrain(canvas) {
      const key = [settings.landscape, settings.landscape === "two" && settings.noise, canvas.width, canvas.height].join();
      if (terrain?.key === key) return terrain.image;
      const [w, h] = [canvas.width, canvas.height];
      const image = document.createElement("canvas");
      [image.width, image.height] = [w, h];
      const pixels = new ImageData(w, h);
      const heights = new Float32Array(w * h);
      const { expected } = T.landscapes[settings.landscape];
      for (let j = 0, k = 0; j < h; j++) {
        for (let i = 0; i < w; i++, k++) {
          heights[k] = expected([((2 * i) / w - 1) * VIEW.x, (1 - (2 * j) / h) * VIEW.y], settings.noise);
        }
      }
      const low = heights.reduce((a, b) => Math.min(a, b));
      const high = heights.reduce((a, b) => Math.max(a, b));
      const level = heights.map((v) => Math.sqrt((v - low) / (high - low))); // so that lines are even in a bowl
      const [from, to, ink] = [colors.low, colors.high, colors.ink].map(rgb);
      for (let k = 0; k < w * h; k++) {
        const t = level[k];
        const slope = 12 * Math.hypot(level[Math.min(k + 1, w * h - 1)] - t, level[Math.min(k + w, w * h - 1)] - t) || 1;
        const off = Math.abs(((12 * t + 0.5) % 1) - 0.5) / slope; // pixels from the next contour
        const line = 0.16 * Math.max(0, 1 - off) * Math.min(1, 0.5 / slope);
        for (let c = 0; c < 3; c++) {
          pixels.data[4 * k + c] = (from[c] + (to[c] - from[c]) * t) * (1 - line) + ink[c] * line;
        }
        pixels.data[4 * k + 3] = 255;
      }
      image.getContext("2d").putImageData(pixels, 0, 0);
      terrain = { key, image };
      return image;
    }

    function circle(ctx, [x, y], radius, style = {}) {
      ctx.save();
      ctx.beginPath();
      ctx.ellipse(x, y, radius, style.radius2 ?? radius, style.angle ?? 0, 0, 2 * Math.PI);
      ctx.globalAlpha = style.alpha ?? 1;
      if (style.fill) {
        ctx.fillStyle = style.fill;
        ctx.fill();
      }
      if (style.stroke) {
        ctx.setLineDash(style.dash ?? []);
        ctx.lineWidth = style.width ?? 1.5;
        ctx.strokeStyle = style.stroke;
        ctx.stroke();
      }
      ctx.restore();
    }

    function cross(ctx, [x, y], size) {
      ctx.strokeStyle = colors.truth;
      ctx.lineWidth = 2;
      ctx.beginPath();
      for (const way of [-1, 1]) {
        ctx.moveTo(x - size, y - way * size);
        ctx.lineTo(x + size, y + way * size);
      }
      ctx.stroke();
    }

    // The paths of both twins up to the current step; from a reset they go on at its other end.
    function paths(ctx, at, width, first = 0) {
      for (const [twin, color] of [[0, colors.one], [1, colors.two]]) {
        ctx.strokeStyle = color;
        ctx.lineWidth = width;
        ctx.beginPath();
        for (let t = first; t <= step; t++) {
          const [x, y] = at(run.twins[t][twin]);
          if (t === first) ctx.moveTo(x, y);
          else ctx.lineTo(x, y);
          if (run.jumps[t] && t < step) ctx.moveTo(...at(run.jumps[t][twin]));
        }
        ctx.stroke();
      }
    }

    const lensCenter = () => T.landscapes[settings.landscape].minimum(T.middle(...run.twins[step]), settings.noise);

    function drawMap() {
      const { ctx, width, height } = prepare(map);
      ctx.drawImage(drawTerrain(map), 0, 0, width, height);
      const unit = width / (2 * VIEW.x);
      const at = ([x, y]) => [width / 2 + x * unit, height / 2 - y * unit];
      const [one, two] = run.counts;
      run.data.forEach((x, i) => {
        const style = one[i] && two[i] ? { fill: colors.faint, alpha: 0.75 }
          : one[i] ? { fill: colors.one, alpha: 0.75 }
          : two[i] ? { fill: colors.two, alpha: 0.75 } : { stroke: colors.faint, width: 1, alpha: 0.75 };
        for (const spot of T.landscapes[settings.landscape].spots(x)) circle(ctx, at(spot), width < 500 ? 1.7 : 2.2, style);
      });
      for (const fit of repeats?.fits ?? []) circle(ctx, at(fit), 1.3, { fill: colors.truth, alpha: 0.7 });
      for (let t = 20; t < step; t += 20) {
        circle(ctx, at(T.middle(...run.twins[t])), run.sigmas[t] * unit, { stroke: colors.ink, width: 1, alpha: 0.22 });
      }
      paths(ctx, at, 1.6);
      for (const t of Object.keys(run.jumps)) {
        if (t > step) break;
        const [x, y] = at(T.middle(...run.twins[t]));
        ctx.fillStyle = colors.ink;
        ctx.beginPath();
        ctx.moveTo(x, y - 4.5);
        ctx.lineTo(x + 4, y + 2.5);
        ctx.lineTo(x - 4, y + 2.5);
        ctx.fill();
      }
      circle(ctx, at(settings.start), 4, { stroke: colors.ink, fill: colors.paper });
      const center = lensCenter();
      circle(ctx, at(center), LENS * theory * unit, { stroke: colors.truth, width: 1.5, alpha: 0.9 });
      circle(ctx, at(center), theory * unit, { stroke: colors.truth, width: 1.6, dash: [4, 4] });
      const mean = T.middle(...run.twins[step]);
      circle(ctx, at(mean), run.sigmas[step] * unit, { stroke: colors.ink, fill: colors.ink + "14", width: 2 });
      const size = Math.max(3, Math.min(5.5, theory * unit)); // small circles stay visible
      run.twins[step].forEach((w, k) =>
        circle(ctx, at(w), size, { fill: [colors.one, colors.two][k], stroke: colors.paper }));
    }

    function drawLens() {
      const { ctx, width, height } = prepare(lens);
      const radius = Math.min(width, height) / 2 - 2;
      const unit = radius / (LENS * theory);
      const center = lensCenter();
      const at = ([x, y]) => [width / 2 + (x - center[0]) * unit, height / 2 - (y - center[1]) * unit];
      const middle = [width / 2, height / 2];
      ctx.save();
      circle(ctx, middle, radius, { fill: colors.high });
      ctx.beginPath();
      ctx.arc(...middle, radius, 0, 2 * Math.PI);
      ctx.clip();
      for (const fit of repeats?.fits ?? []) circle(ctx, at(fit), 1.8, { fill: colors.truth, alpha: 0.55 });
      const { variance, angle } = T.landscapes[settings.landscape];
      const axes = variance(settings.noise).map((v) => (Math.sqrt(v * (settings.n - 1)) / settings.n) * unit);
      if (axes[0] / axes[1] > 1.2) {
        circle(ctx, middle, axes[0], { radius2: axes[1], angle: -angle, stroke: colors.truth, width: 1, dash: [2, 3] });
      }
      circle(ctx, middle, theory * unit, { stroke: colors.truth, width: 2, dash: [6, 5] });
      cross(ctx, middle, 5);
      ctx.globalAlpha = 0.55;
      paths(ctx, at, 1.3, Math.max(0, step - 40));
      ctx.globalAlpha = 1;
      const twins = run.twins[step].map(at);
      const mean = at(T.middle(...run.twins[step]));
      ctx.strokeStyle = colors.ink;
      ctx.lineWidth = 1;
      ctx.beginPath();
      ctx.moveTo(...twins[0]);
      ctx.lineTo(...twins[1]);
      ctx.stroke();
      circle(ctx, mean, run.sigmas[step] * unit, { stroke: colors.ink, fill: colors.ink + "14", width: 2.5 });
      circle(ctx, mean, 2.5, { fill: colors.ink });
      twins.forEach((w, k) => circle(ctx, w, 7, { fill: [colors.one, colors.two][k], stroke: colors.paper }));
      const outside = run.twins[step].filter((w) => Math.hypot(w[0] - center[0], w[1] - center[1]) > LENS * theory).length;
      ctx.fillStyle = colors.faint;
      ctx.textAlign = "center";
      if (outside) {
        const text = outside === 2 ? "both twins are outside" : "one twin is outside";
        ctx.strokeStyle = colors.high; // a halo, because circles pass here
        ctx.lineWidth = 4;
        ctx.strokeText(text, width / 2, height / 2 + radius * 0.62);
        ctx.fillText(text, width / 2, height / 2 + radius * 0.62);
      }
      ctx.restore();
      circle(ctx, middle, radius, { stroke: colors.line, width: 2 });
      // The scale: a round length of at most half the radius.
      const length = [5, 2, 1].flatMap((k) => [0.001, 0.01, 0.1, 1].map((p) => k * p)).sort((a, b) => b - a)
        .find((k) => k * unit < radius / 2);
      const [x, y] = [width / 2 - (length * unit) / 2, height / 2 + radius * 0.84];
      ctx.fillStyle = ctx.strokeStyle = colors.ink;
      ctx.lineWidth = 1.5;
      ctx.beginPath();
      ctx.moveTo(x, y);
      ctx.lineTo(x + length * unit, y);
      ctx.stroke();
      ctx.textAlign = "center";
      ctx.fillText(String(length), width / 2, y - 5);
    }

    function drawChart() {
      const { ctx, width, height } = prepare(chart);
      const side = Math.min(110, width * 0.24); // for the repeats
      const box = { left: 44, right: width - side - 8, top: 10, bottom: height - 34 };
      const [low, high] = RANGE.map(Math.log);
      const x = (t) => box.left + ((box.right - box.left) * t) / STEPS;
      const y = (s) => box.bottom - ((box.bottom - box.top) * (Math.log(Math.max(s, RANGE[0])) - low)) / (high - low);
      ctx.lineWidth = 1;
      ctx.textAlign = "right";
      ctx.textBaseline = "middle";
      for (const tick of [0.001, 0.01, 0.1, 1]) {
        ctx.strokeStyle = colors.line;
        ctx.beginPath();
        ctx.moveTo(box.left, y(tick));
        ctx.lineTo(width - 4, y(tick));
        ctx.stroke();
        ctx.fillStyle = colors.faint;
        ctx.fillText(String(tick), box.left - 6, y(tick));
      }
      ctx.textAlign = "center";
      ctx.textBaseline = "top";
      for (let t = 0; t <= STEPS; t += 100) ctx.fillText(String(t), x(t), box.bottom + 4);
      ctx.fillText("steps", (box.left + box.right) / 2, box.bottom + 18);
      ctx.fillText(`${REPEATS} data sets`, box.right + 8 + side / 2, box.bottom + 18);
      ctx.textAlign = "left";
      ctx.fillText("σ", 4, box.top - 4);
      ctx.strokeStyle = colors.truth;
      ctx.lineWidth = 2;
      ctx.setLineDash([6, 5]);
      ctx.beginPath();
      ctx.moveTo(box.left, y(theory));
      ctx.lineTo(width - 4, y(theory));
      ctx.stroke();
      ctx.setLineDash([]);
      ctx.strokeStyle = colors.ink;
      ctx.beginPath();
      for (let t = 1; t <= step; t++) ctx.lineTo(x(t), y(run.sigmas[t]));
      ctx.stroke();
      circle(ctx, [x(step), y(run.sigmas[step])], 4, { fill: colors.ink, stroke: colors.paper });
      if (!repeats?.sigmas.length) {
        ctx.textAlign = "right";
        ctx.textBaseline = "bottom";
        ctx.fillStyle = colors.truth;
        ctx.fillText("theory", width - 4, y(theory) - 4);
        return;
      }
      const bins = 33;
      const counts = new Array(bins).fill(0);
      for (const s of repeats.sigmas) {
        const k = ((Math.log(Math.max(s, RANGE[0])) - low) / (high - low)) * bins;
        counts[Math.max(0, Math.min(bins - 1, Math.floor(k)))] += 1;
      }
      const [tall, most] = [(box.bottom - box.top) / bins, Math.max(12, ...counts)];
      ctx.fillStyle = colors.ink;
      ctx.globalAlpha = 0.55;
      counts.forEach((count, k) =>
        ctx.fillRect(box.right + 8, box.bottom - (k + 1) * tall + 0.5, ((side - 12) * count) / most, tall - 1));
      ctx.globalAlpha = 1;
      ctx.beginPath(); // an arrow at the root mean square
      const [tip, level] = [box.right + 7, y(repeats.rms)];
      ctx.moveTo(tip, level);
      ctx.lineTo(tip - 9, level - 5);
      ctx.lineTo(tip - 9, level + 5);
      ctx.fill();
    }

    // ---- what the visitor does -----------------------------------------------------------------------------------

    root.addEventListener("input", ({ target }) => {
      const { name, value } = target;
      if (name === "step") {
        touched = true;
        playing = false;
        step = Number(value);
        show();
      } else if (name in SLIDERS) change({ [name]: SLIDERS[name].values[value] });
      else if (name === "twinplay-reset") change({ reset: value });
      else if (name === "twinplay-landscape") {
        change({ landscape: value, start: value === "two" ? RIDGE : DEFAULTS.start });
      }
    });

    const deeds = {
      play: () => { touched = true; play(); },
      step: () => { touched = true; playing = false; step = Math.min(STEPS, step + 1); show(); },
      restart: () => { touched = true; step = 0; playing = false; play(); },
      data: () => { change({ seed: (settings.seed % 1e6) + 1 }); if (!step) play(); },
      repeat,
      link: async () => {
        touched = true;
        history.replaceState(history.state, "", address());
        const button = find('[data-do="link"]');
        try {
          await navigator.clipboard.writeText(location.href);
          button.textContent = "Copied";
        } catch {
          button.textContent = "The link is in the address bar";
        }
        setTimeout(() => { button.textContent = "Copy link to this run"; }, 2000);
      },
    };
    root.addEventListener("click", ({ target }) => {
      const button = target.closest("button");
      if (button?.dataset.do) deeds[button.dataset.do]();
      else if (button?.dataset.preset) {
        settings = { ...DEFAULTS, ...PRESETS[button.dataset.preset][1] };
        step = 0;
        playing = false;
        change({});
        play();
      }
    });

    const startAt = (x, y) => {
      const round = (w, most) => Math.round(100 * Math.max(-most, Math.min(most, w))) / 100;
      change({ start: [round(x, VIEW.x), round(y, VIEW.y)] });
    };
    map.addEventListener("pointerdown", ({ offsetX, offsetY }) => {
      startAt(((2 * offsetX) / map.clientWidth - 1) * VIEW.x, (1 - (2 * offsetY) / map.clientHeight) * VIEW.y);
    });
    map.addEventListener("keydown", (event) => {
      const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
      if (!way) return;
      event.preventDefault();
      startAt(settings.start[0] + 0.05 * way[0], settings.start[1] + 0.05 * way[1]);
    });

    addEventListener("hashchange", () => {
      if (!root.isConnected || !readAddress()) return;
      playing = false;
      refresh();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", readColors);
    new MutationObserver(readColors).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
    new ResizeObserver(draw).observe(root);

    const shared = readAddress();
    if (!shared && calm.matches) step = STEPS;
    refresh();
    readColors();
    if (!shared && !calm.matches) play();
  }

  document.querySelectorAll(".twinplay:not([data-ready])").forEach(mount);
})();
