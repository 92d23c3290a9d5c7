/* Twin-Boot on three landscapes: the mathematics of the page, and nothing of the screen.
 *
 * Points are [x, y]. A landscape has a loss l(w; x) for each datum x ~ N(0, noise^2 I), and
 *
 *   gradient(w, x)       of l at the weights w
 *   expected(w, noise)   the mean loss for endless data, which the map shows
 *   spots(x)             where datum x alone would put the weights, which the dots show
 *   minimum(w, noise)    of the expected loss, nearest to w
 *   curvature(noise)     of the expected loss at a minimum, along its two main axes
 *   variance(noise)      along these axes, of the minimum of the mean loss: n times that of n data, for large n
 *   angle                of the first axis
 *
 * tests/docs/test_play.py compares all of it with the Python package, on the same numbers.
 */
window.twinboot = (() => {
  "use strict";

  const WIDTH = 0.5; // standard deviation of a well, as in `twinboot basins`
  const WELLS = [[-1, 0], [1, 0]]; // Appendix A.3 of the paper
  const VALLEY = { stretch: [1 / 3, 1], angle: Math.PI / 7 }; // along it, data say a third as much as across it

  const bump = (w, center, variance) =>
    Math.exp(-((w[0] - center[0]) ** 2 + (w[1] - center[1]) ** 2) / (2 * variance));

  // A w for the symmetric matrix A that stretches the valley's axes.
  const [cos, sin] = [Math.cos(VALLEY.angle), Math.sin(VALLEY.angle)];
  const stretched = ([x, y], [along, across]) => {
    const [u, v] = [along * (cos * x + sin * y), across * (cos * y - sin * x)];
    return [cos * u - sin * v, sin * u + cos * v];
  };

  const landscapes = {
    // l(w; x) = ||w - x||^2: the minimum is the mean of the data (Figure 1 of the paper).
    one: {
      gradient: (w, x) => [2 * (w[0] - x[0]), 2 * (w[1] - x[1])],
      expected: (w) => w[0] ** 2 + w[1] ** 2,
      spots: (x) => [x],
      minimum: () => [0, 0],
      curvature: () => [2, 2],
      variance: (noise) => [noise ** 2, noise ** 2],
      angle: 0,
    },

    // l(w; x) = L(w - x), L(w) = -sum over wells of exp(-||w - well||^2 / (2 WIDTH^2)) (Figure 2).
    two: {
      gradient: (w, x) => {
        const g = [0, 0];
        for (const well of WELLS) {
          const [dx, dy] = [w[0] - x[0] - well[0], w[1] - x[1] - well[1]];
          const slope = Math.exp(-(dx * dx + dy * dy) / (2 * WIDTH ** 2)) / WIDTH ** 2;
          g[0] += slope * dx;
          g[1] += slope * dy;
        }
        return g;
      },
      // The mean of shifted wells is a wider and shallower well.
      expected: (w, noise) => {
        const wide = WIDTH ** 2 + noise ** 2;
        return (-(WIDTH ** 2) / wide) * (bump(w, WELLS[0], wide) + bump(w, WELLS[1], wide));
      },
      spots: (x) => WELLS.map((well) => [well[0] + x[0], well[1] + x[1]]),
      minimum: (w, noise) => [(w[0] < 0 ? -1 : 1) * wellAt(noise), 0],
      curvature: (noise) => curvatureOfWells(wellAt(noise), noise),
      variance: (noise) => sandwich(noise),
      angle: 0,
    },

    // l(w; x) = ||A w - x||^2: noisy measurements, of which one direction of the weights changes little.
    valley: {
      gradient: (w, x) => {
        const seen = stretched(w, VALLEY.stretch);
        return stretched([2 * (seen[0] - x[0]), 2 * (seen[1] - x[1])], VALLEY.stretch);
      },
      expected: (w) => {
        const seen = stretched(w, VALLEY.stretch);
        return seen[0] ** 2 + seen[1] ** 2;
      },
      spots: (x) => [stretched(x, VALLEY.stretch.map((s) => 1 / s))],
      minimum: () => [0, 0],
      curvature: () => VALLEY.stretch.map((s) => 2 * s ** 2),
      variance: (noise) => VALLEY.stretch.map((s) => (noise / s) ** 2),
      angle: VALLEY.angle,
    },
  };

  // Second derivatives of the expected two wells at (x, 0), along and across the line between them.
  function curvatureOfWells(x, noise) {
    const wide = WIDTH ** 2 + noise ** 2;
    const depth = WIDTH ** 2 / wide;
    let [along, across] = [0, 0];
    for (const well of WELLS) {
      const height = (depth * bump([x, 0], well, wide)) / wide;
      along += height * (1 - (x - well[0]) ** 2 / wide);
      across += height;
    }
    return [along, across];
  }

  // Newton's method, from the right well; there are two wells while WIDTH^2 + noise^2 < 1.
  function wellAt(noise) {
    const wide = WIDTH ** 2 + noise ** 2;
    let x = WELLS[1][0];
    for (let k = 0; k < 15; k++) {
      let slope = 0;
      for (const well of WELLS) slope += ((WIDTH ** 2 / wide) * bump([x, 0], well, wide) * (x - well[0])) / wide;
      x -= slope / curvatureOfWells(x, noise)[0];
    }
    return x;
  }

  // H^-1 C H^-1: H is the curvature of the expected loss, C the covariance of one datum's gradient, by quadrature on an
  // even grid. Both are diagonal, because the wells are symmetric.
  function sandwich(noise) {
    const at = [wellAt(noise), 0];
    const gap = Math.min(noise, WIDTH) / 2;
    const nodes = [];
    for (let x = -7 * noise; x < 7 * noise; x += gap) nodes.push(x);
    const weights = nodes.map((x) => Math.exp(-0.5 * (x / noise) ** 2));
    const total = weights.reduce((a, b) => a + b) ** 2;
    const spread = [0, 0];
    nodes.forEach((x, i) =>
      nodes.forEach((y, j) => {
        const g = landscapes.two.gradient(at, [x, y]);
        for (const k of [0, 1]) spread[k] += (weights[i] * weights[j] * g[k] ** 2) / total;
      })
    );
    const curvature = curvatureOfWells(at[0], noise);
    return spread.map((c, k) => c / curvature[k] ** 2);
  }

  // What sigma should be: the root mean square over both weights, and the share (n - 1) / n that a bootstrap sees.
  function theory(landscape, noise, n) {
    const [a, b] = landscapes[landscape].variance(noise);
    return (Math.sqrt((a + b) / 2) * Math.sqrt(n - 1)) / n;
  }

  // By which factor the noise on the weights enlarges sigma at a constant learning rate, without resets: exact for one
  // well and the valley, close for two wells. A step closes the share a = lr * curvature of the way to the minimum.
  function feedback(landscape, noise, lr) {
    const gains = landscapes[landscape].curvature(noise).map((c) => (lr * c) / (2 - lr * c));
    return 1 / Math.sqrt(1 - (gains[0] + gains[1]) / 2);
  }

  // Line 10 of Algorithm 1: sigma^2 = ||w1 - w2||^2 / (2 D).
  function sigma(w1, w2) {
    return Math.sqrt(w1.reduce((sum, w, k) => sum + (w - w2[k]) ** 2, 0) / (2 * w1.length));
  }

  const middle = (w1, w2) => w1.map((w, k) => (w + w2[k]) / 2);

  // How far from their mean a reset puts the twins, in units of sigma, given standard normals e1 and e2.
  const resets = {
    sample: (e1, e2) => [e1, e2],
    mean: (e1, e2) => [e1.map(() => 0), e2.map(() => 0)],
    centered: (e1, e2) => [e1.map((e, k) => (e - e2[k]) / 2), e2.map((e, k) => (e - e1[k]) / 2)],
  };

  // Line 13: both twins drawn anew around their mean.
  function reset(mode, w1, w2, s, e1, e2) {
    const mean = middle(w1, w2);
    return resets[mode](e1, e2).map((away) => away.map((e, k) => mean[k] + s * e));
  }

  // Line 2: how often each of n samples is among n draws with replacement. `uniform()` is in [0, 1).
  function bootstrap(n, uniform) {
    const counts = new Array(n).fill(0);
    for (let k = 0; k < n; k++) counts[Math.floor(uniform() * n)] += 1;
    return counts;
  }

  // The gradient of the mean loss over a bootstrap sample.
  function gradient(landscape, w, data, counts) {
    const of = landscapes[landscape].gradient;
    const sum = [0, 0];
    let draws = 0;
    for (let i = 0; i < data.length; i++) {
      if (counts[i] === 0) continue;
      const g = of(w, data[i]);
      sum[0] += counts[i] * g[0];
      sum[1] += counts[i] * g[1];
      draws += counts[i];
    }
    return [sum[0] / draws, sum[1] / draws];
  }

  // Lines 6 to 9 for one twin: weights with noise, their gradient, a step of plain gradient descent.
  function step(landscape, w, s, e, data, counts, lr) {
    const noisy = [w[0] + s * e[0], w[1] + s * e[1]];
    const g = gradient(landscape, noisy, data, counts);
    return [w[0] - lr * g[0], w[1] - lr * g[1]];
  }

  // The same seed gives the same numbers: mulberry32, and Box and Muller's normals.
  function random(seed) {
    let state = seed >>> 0;
    const uniform = () => {
      state = (state + 0x6d2b79f5) >>> 0;
      let t = Math.imul(state ^ (state >>> 15), state | 1);
      t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
      return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
    };
    const normals = () => {
      const radius = Math.sqrt(-2 * Math.log(1 - uniform()));
      const angle = 2 * Math.PI * uniform();
      return [radius * Math.cos(angle), radius * Math.sin(angle)];
    };
    return { uniform, normals };
  }

  // Independent streams, so that a slider changes only what it is about: another n keeps the first data, and other
  // resets keep the noise of the steps.
  function streams(seed) {
    const of = (purpose) => random(Math.imul(seed, 0x9e3779b1) + Math.imul(purpose + 1, 0x85ebca6b));
    return { data: of(0), samples: [of(1), of(2)], noise: of(3), resets: of(4) };
  }

  // A whole run: settings {landscape, n, noise, lr, reset, every, seed, start}, the same settings the same run.
  // twins[t] are the weights after t steps, before the reset if there is one; sigmas[t] their sigma; jumps[t] the weights
  // after that reset. `source` has the random numbers.
  function run(settings, steps, source = streams(settings.seed)) {
    const { landscape, n, noise, lr, reset: mode, every } = settings;
    const data = Array.from({ length: n }, () => source.data.normals().map((e) => noise * e));
    const counts = source.samples.map((stream) => bootstrap(n, stream.uniform));
    let [w1, w2, s] = [settings.start, settings.start, 0];
    const [twins, sigmas, jumps] = [[[w1, w2]], [0], {}];
    for (let t = 1; t <= steps; t++) {
      const [e1, e2] = [source.noise.normals(), source.noise.normals()];
      w1 = step(landscape, w1, s, e1, data, counts[0], lr);
      w2 = step(landscape, w2, s, e2, data, counts[1], lr);
      s = sigma(w1, w2);
      twins.push([w1, w2]);
      sigmas.push(s);
      if (mode !== "never" && t % every === 0) {
        [w1, w2] = reset(mode, w1, w2, s, source.resets.normals(), source.resets.normals());
        jumps[t] = [w1, w2];
      }
    }
    return { data, counts, twins, sigmas, jumps };
  }

  // Plain gradient descent on all data, without twins: where other data would lead is the uncertainty that is meant.
  function plain(settings, data, steps) {
    const ones = data.map(() => 1);
    let w = settings.start;
    for (let t = 0; t < steps; t++) w = step(settings.landscape, w, 0, [0, 0], data, ones, settings.lr);
    return w;
  }

  const apart = (landscape, w1, w2) => landscape === "two" && w1[0] * w2[0] < 0;

  return {
    landscapes, theory, feedback, sigma, middle, reset, bootstrap, gradient, step, random, run, plain, apart, VALLEY,
  };
})();
