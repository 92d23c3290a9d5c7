"""The page to play with: its mathematics is that of the package, and a visitor can use it."""

import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browser import browser, in_browser, view
from torch import Tensor, nn

from twinboot import Bootstrap, Twins, resets
from twinboot._core import seeds
from twinboot.experiments import gaussian
from twinboot.experiments.wells import landscape

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "play" / "alone.html").as_uri()
ANGLE, STRETCH = math.pi / 7, (1 / 3, 1.0)  # of the valley
SETTINGS: dict[str, Any] = {"n": 12, "noise": 0.3, "lr": 0.1, "every": 7, "seed": 3, "start": [0.2, 0.5]}

pytestmark = in_browser


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with browser() as driver:
        yield driver


@pytest.fixture
def page(driver: Any) -> Callable[..., Any]:
    """Opens the page for a visitor with these wishes, and fails if the browser complains."""

    def load(state: str = "", **wishes: Any) -> Any:
        view(driver, **{"calm": True, **wishes})
        driver.get("about:blank")
        driver.get(PAGE + state)
        assert driver.get_log("browser") == []
        return driver

    return load


@pytest.fixture
def js(page: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a function of twins.js."""
    driver = page()
    return lambda call, *arguments: driver.execute_script(f"const T = twinboot; return {call}", *arguments)


def valley() -> Tensor:
    cos, sin = math.cos(ANGLE), math.sin(ANGLE)
    turn = torch.tensor([[cos, -sin], [sin, cos]], dtype=torch.float64)
    return turn @ torch.diag(torch.tensor(STRETCH, dtype=torch.float64)) @ turn.T


# The loss of each datum, by the package where it has it.
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "one": lambda w, x: (x - w).square().sum(-1),
    "two": lambda w, x: landscape.loss(w, x, 0.5, "shift"),
    "valley": lambda w, x: (w @ valley() - x).square().sum(-1),
}


class Point(nn.Module):
    def __init__(self, start: list[float]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start, dtype=torch.float64))


def test_sigma_is_that_of_twins(js: Callable[..., Any]) -> None:
    for pair in torch.randn(5, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)):
        twins = Twins(Point([0.0, 0.0]))
        for twin, w in zip(twins, pair, strict=True):
            twin.w.data.copy_(w)
        twins.update()
        assert js("T.sigma(...arguments)", *pair.tolist()) == pytest.approx(twins.sigma["(model)"].item(), rel=1e-12)


@pytest.mark.parametrize("n", [2, 5, 400])
def test_counts_are_those_of_the_bootstrap(js: Callable[..., Any], n: int) -> None:
    for twin, counts in enumerate(Bootstrap(n, seed=9).counts):
        drawn = np.random.default_rng(seeds.derive(9, "bootstrap", twin)).integers(0, np.full(n, n))
        uniform = ((drawn + 0.5) / n).tolist()
        assert js("T.bootstrap(arguments[0], () => arguments[1].shift())", n, uniform) == counts.tolist()


def test_random_numbers_have_the_moments_of_theirs(js: Callable[..., Any]) -> None:
    normals = np.array(js("(r => Array.from({length: 5000}, () => r.normals()))(T.random(7))")).flatten()
    assert abs(normals.mean()) < 4 / math.sqrt(10_000)
    assert abs(normals.var() - 1) < 4 * math.sqrt(2 / 10_000)
    unseen = js("(r => T.bootstrap(10000, r.uniform).filter(c => c === 0).length / 10000)(T.random(7))")
    assert abs(unseen - math.exp(-1)) < 4 * math.sqrt(math.exp(-1) * (1 - 2 * math.exp(-1)) / 10_000)


@pytest.mark.parametrize("mode", resets.MODES)
def test_resets_are_those_of_the_package(js: Callable[..., Any], mode: str) -> None:
    w1, w2, e1, e2 = torch.randn(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    away = torch.zeros(2, 2, dtype=torch.float64)
    resets.MODES[mode](away, lambda noise: noise.copy_(torch.stack([e1, e2])))
    expected = (w1 + w2) / 2 + 0.3 * away
    found = js(f"T.reset('{mode}', ...arguments)", w1.tolist(), w2.tolist(), 0.3, e1.tolist(), e2.tolist())
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_the_losses(js: Callable[..., Any], name: str) -> None:
    for w, x in torch.randn(5, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2)):
        expected = torch.func.grad(LOSSES[name])(w, x)
        found = js(f"T.landscapes.{name}.gradient(...arguments)", w.tolist(), x.tolist())
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected)


@pytest.mark.parametrize("name", LOSSES)
def test_each_datum_alone_has_its_minima_where_its_dots_are(js: Callable[..., Any], name: str) -> None:
    x = torch.tensor([0.1, -0.3], dtype=torch.float64)
    for spot in js(f"T.landscapes.{name}.spots(arguments[0])", x.tolist()):
        slope = torch.func.grad(LOSSES[name])(torch.tensor(spot, dtype=torch.float64), x)
        assert slope.norm() < 0.01  # of two wells each has a little slope at the other's centre


@pytest.mark.parametrize("noise", [0.05, 0.3, 0.6])
def test_the_map_of_two_wells_is_the_mean_landscape(js: Callable[..., Any], noise: float) -> None:
    mean = landscape.mean_landscape(0.5, noise, "shift")
    for w in ([0.0, 0.8], [1.3, -0.4]):
        found = js("T.landscapes.two.expected(...arguments)", w, noise)
        assert found == pytest.approx(mean(torch.tensor(w, dtype=torch.float64)).item(), rel=1e-6)


@pytest.mark.parametrize("noise", [0.05, 0.3, 0.6])
@pytest.mark.parametrize("n", [5, 400])
def test_theory_is_that_of_the_package(js: Callable[..., Any], noise: float, n: int) -> None:
    one = math.sqrt(gaussian.tau_squared(gaussian.Config(variance=noise**2), n))
    assert js("T.theory('one', ...arguments)", noise, n) == pytest.approx(one)
    two = landscape.exact_line(landscape.Setting(noise=noise, size=n, width=0.5))
    assert js("T.theory('two', ...arguments)", noise, n) == pytest.approx(two, rel=1e-6)
    covariance = noise**2 / n * (n - 1) / n * torch.linalg.inv(valley() @ valley())
    expected = math.sqrt(covariance.trace() / 2)
    assert js("T.theory('valley', ...arguments)", noise, n) == pytest.approx(expected)


@pytest.mark.parametrize("lr", [0.02, 0.1, 0.4])
def test_the_feedback_of_noise_is_the_closed_form(js: Callable[..., Any], lr: float) -> None:
    closed = gaussian.expected(gaussian.Config(lr=lr, constant=2000))["twins, constant rate"]
    assert js("T.feedback('one', 0.3, arguments[0])", lr) == pytest.approx(math.sqrt(closed))


def test_sigma_of_many_runs_is_that_of_theory(js: Callable[..., Any]) -> None:
    """sigma^2 of two weights is exponential, so the mean of 400 has a relative standard error of 1 / 20; the data add
    about 2 / (n - 1) / 2 to its variance."""
    call = "Array.from({length: 400}, (_, k) => T.run({...arguments[0], seed: k}, 150).sigmas[150] ** 2)"
    for name in ("one", "two"):
        settings = {**SETTINGS, "n": 60, "landscape": name, "reset": "never", "start": [1.1, 0.1]}
        ratio = np.mean(js(call, settings)) / js(f"T.theory('{name}', 0.3, 60)") ** 2
        assert abs(ratio / js(f"T.feedback('{name}', 0.3, 0.1)") ** 2 - 1) < 4 / 20


@pytest.mark.parametrize("mode", ["sample", "mean", "centered", "never"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_run_is_that_of_twins(js: Callable[..., Any], name: str, mode: Any) -> None:
    """The loop of the package, and that of the page with the same random numbers."""
    n, lr, every, start = (SETTINGS[key] for key in ("n", "lr", "every", "start"))
    normals = torch.randn(n, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    bootstrap, twins = Bootstrap(n, seed=5), Twins(Point(start), seed=6)
    optimizer = torch.optim.SGD(twins.parameters(), lr=lr)
    noise: list[Any] = []
    jumps: list[Any] = []
    paths, sigmas = [], []

    def weights() -> Tensor:
        return torch.stack([twin.get_parameter("w").detach().clone() for twin in twins])

    for step in range(1, 31):
        clean, sigma = weights(), twins.sigma["(model)"]
        with twins.sampled():
            noise += ((weights() - clean) / sigma if sigma > 0 else clean * 0).tolist()
            for twin, counts in zip(twins, bootstrap.counts, strict=True):
                (LOSSES[name](twin.get_parameter("w"), 0.3 * normals) * counts / n).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        twins.update()
        paths.append(weights())
        sigmas.append(twins.sigma["(model)"].item())
        if mode != "never" and step % every == 0:
            center = weights().mean(0)
            twins.reset(mode)
            jumps += ((weights() - center) / sigmas[-1]).tolist()

    drawn = [((b.repeat_interleave(c) + 0.5) / n).tolist() for b, c in ((torch.arange(n), c) for c in bootstrap.counts)]
    source = "{data: {normals: () => a[0].shift()}, samples: a[1].map(u => ({uniform: () => u.shift()})),"
    source += " noise: {normals: () => a[2].shift()}, resets: {normals: () => a[3].shift()}}"
    settings = {**SETTINGS, "landscape": name, "reset": mode}
    call = f"(a => T.run(a[4], 30, {source}))(arguments)"
    found = js(call, normals.tolist(), drawn, noise, jumps, settings)
    assert found["counts"] == bootstrap.counts.tolist()
    torch.testing.assert_close(torch.tensor(found["twins"][1:], dtype=torch.float64), torch.stack(paths))
    assert found["sigmas"][1:] == pytest.approx(sigmas)
    assert len(found["jumps"]) == (0 if mode == "never" else 4)


def shown(driver: Any, name: str) -> str:
    return str(driver.execute_script(f"return document.querySelector('[data-of=\"{name}\"]').textContent"))


def outcome(driver: Any) -> str:
    return str(driver.execute_script("return document.querySelector('.tp-outcome').textContent"))


def press(driver: Any, deed: str) -> None:
    driver.execute_script(f"document.querySelector('[data-do=\"{deed}\"]').click()")


def pixels(driver: Any, canvas: str, color: str) -> int:
    """How many pixels of a canvas have nearly the colour of that name."""
    script = """
        const canvas = document.querySelector(arguments[0]);
        const style = getComputedStyle(document.querySelector(".twinplay"));
        const name = style.getPropertyValue("--tp-" + arguments[1]).trim();
        const rgb = [1, 3, 5].map(k => parseInt(name.slice(k, k + 2), 16));
        const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
        copy.drawImage(canvas, 0, 0);
        const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
        let found = 0;
        for (let k = 0; k < data.length; k += 4) {
          if (data[k + 3] > 200 && rgb.every((c, j) => Math.abs(c - data[k + j]) < 25)) found += 1;
        }
        return found;"""
    return int(driver.execute_script(script, canvas, color))


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False), (390, True)])
def test_circles_and_paths_appear_and_fit_the_screen(page: Callable[..., Any], width: int, dark: bool) -> None:
    driver = page(width=width, dark=dark)
    for preset in range(6):
        driver.execute_script(f"document.querySelectorAll('[data-preset]')[{preset}].click()")
        for color in ("one", "two", "truth"):  # paths of both twins, and the circle of theory
            assert pixels(driver, ".tp-map", color) > 5  # few on a phone, with plenty of data
        for color in ("ink", "truth"):  # both circles
            assert pixels(driver, ".tp-lens canvas", color) > 50
        assert pixels(driver, ".tp-chart canvas", "ink") > 100
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    small = "return [...document.querySelectorAll('.twinplay *')].map(e => parseFloat(getComputedStyle(e).fontSize))"
    assert min(driver.execute_script(small)) >= 11
    assert driver.get_log("browser") == []


def test_sliders_move_by_keys_and_theory_follows(page: Callable[..., Any]) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    driver = page("#landscape=one&n=100&noise=0.3&lr=0.1&reset=sample&every=50&seed=4&step=300")
    assert shown(driver, "theory") == f"{0.3 / 10 * math.sqrt(0.99):.2g}0"
    before = shown(driver, "sigma")
    for name, key in (("n", Keys.END), ("noise", Keys.HOME), ("lr", Keys.ARROW_RIGHT), ("every", Keys.ARROW_LEFT)):
        value = shown(driver, name)
        driver.find_element(By.NAME, name).send_keys(key)
        assert shown(driver, name) != value
    assert [shown(driver, name) for name in ("n", "noise", "lr", "every")] == ["400", "0.05", "0.12", "30"]
    assert shown(driver, "theory") == f"{0.05 / 20:.2g}"
    assert shown(driver, "sigma") != before
    driver.find_element(By.CSS_SELECTOR, "input[value=never]").send_keys(Keys.SPACE)
    assert driver.execute_script("return document.querySelector('[name=every]').disabled")
    canvas = driver.find_element(By.CLASS_NAME, "tp-map")
    canvas.send_keys(Keys.ARROW_UP)  # moves the start
    time.sleep(0.4)
    assert "y=0.95" in driver.current_url
    assert driver.get_log("browser") == []


def test_a_link_shows_the_same_run(page: Callable[..., Any]) -> None:
    driver = page("#landscape=two&n=50&noise=0.3&lr=0.1&reset=never&every=10&seed=47&x=0&y=0.8&step=300")
    first = [shown(driver, name) for name in ("sigma", "theory", "step", "n")]
    assert float(first[0]) > 0.5  # this pair parts
    assert "different wells" in outcome(driver)
    driver.execute_script("document.querySelectorAll('input[value=sample]')[0].click()")
    time.sleep(0.4)
    address = driver.current_url
    second = [shown(driver, name) for name in ("sigma", "theory", "step", "n")]
    assert float(second[0]) < 0.1  # resets keep it together
    assert "reset=sample" in address
    page("#" + address.partition("#")[2])
    assert [shown(driver, name) for name in ("sigma", "theory", "step", "n")] == second


@pytest.mark.parametrize(
    "state",
    ["#landscape=moon&n=1e9&noise=-3&lr=x&reset=&every=0&seed=-1&x=&y=999&step=1e9", "#a-heading", "#landscape"],
)
def test_a_wrong_address_is_no_error(page: Callable[..., Any], state: str) -> None:
    driver = page(state)
    assert float(shown(driver, "theory")) > 0
    assert driver.get_log("browser") == []


def test_buttons_do_what_they_say(page: Callable[..., Any]) -> None:
    driver = page("#landscape=one&step=0")
    press(driver, "step")
    assert shown(driver, "step") == "step 1"
    press(driver, "play")
    assert shown(driver, "step") == "step 300"  # less motion: the end at once
    before = shown(driver, "sigma")
    press(driver, "data")
    assert shown(driver, "sigma") != before
    press(driver, "repeat")
    deadline = time.time() + 30
    while not (said := driver.execute_script("return document.querySelector('.tp-outcome').textContent")).startswith(
        "100"
    ):
        assert time.time() < deadline, said
        time.sleep(0.1)
    rms, theory = map(float, re.findall(r"0\.\d+", said)[:2])
    assert abs(rms / theory - 1.06) < 4 / 20  # a standard error of 5 %; the noise on the weights adds 6 %


def test_it_plays_by_itself_unless_less_motion_is_asked_for(page: Callable[..., Any]) -> None:
    driver = page(calm=True)
    assert shown(driver, "step") == "step 300"
    driver = page(calm=False)
    deadline = time.time() + 20
    while int(shown(driver, "step").split()[1]) < 5:
        assert time.time() < deadline
    assert driver.execute_script("return document.querySelector('[data-do=play]').textContent") == "Pause"
    press(driver, "play")
    stopped = shown(driver, "step")
    time.sleep(0.3)
    assert shown(driver, "step") == stopped
    assert "#" not in driver.current_url or "landscape" in driver.current_url


def test_every_control_has_a_name_and_can_be_reached_by_the_tab_key(page: Callable[..., Any]) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    driver = page()
    script = "return [...document.querySelectorAll('.twinplay :is(button, input)')].map(e =>"
    names = driver.execute_script(f"{script} (e.labels?.[0] ?? e).textContent.trim())")
    assert len(names) > 20
    assert all(names), names
    reached = set()
    for _ in range(40):
        driver.switch_to.active_element.send_keys(Keys.TAB)
        here = driver.execute_script(
            "const e = document.activeElement; if (!e.closest('.twinplay')) return null;"
            "const box = e.type === 'radio' ? e.nextElementSibling : e;"
            "return [e.className || e.name || e.dataset.do || e.dataset.preset, getComputedStyle(box).outlineStyle]"
        )
        if here:
            reached.add(here[0])
            assert here[1] == "solid", here  # visible focus
    sliders = {"n", "noise", "lr", "every", "step"}
    radios = {"twinplay-landscape", "twinplay-reset"}
    assert reached >= {"tp-map", "tp-main", "data", "repeat", "link", "0", *sliders, *radios}
    assert driver.find_element(By.CLASS_NAME, "tp-outcome").get_attribute("role") == "status"


def test_it_follows_the_theme_of_the_site(page: Callable[..., Any]) -> None:
    driver = page(dark=False)
    light = driver.execute_script("return document.querySelector('.tp-map').toDataURL()")
    driver.execute_script("document.body.dataset.mdColorScheme = 'slate'")
    time.sleep(0.2)
    slate = driver.execute_script("return document.querySelector('.tp-map').toDataURL()")
    assert slate != light
    page(dark=True)
    assert driver.execute_script("return document.querySelector('.tp-map').toDataURL()") == slate


def test_the_page_of_the_site_loads_files_that_exist_and_nothing_else() -> None:
    for page, folder in ((DOCS / "play.md", "play/"), (DOCS / "play" / "alone.html", "")):
        loaded = re.findall(r'(?:src|href)="(?!data:)([^"]+)"', page.read_text())
        assert loaded == [folder + name for name in ("play.css", "twins.js", "play.js")]
        assert all((page.parent / name).is_file() for name in loaded)
    for file in (DOCS / "play").iterdir():
        assert not re.search(r"https?://|@import|url\(", file.read_text())
    assert sum(file.stat().st_size for file in (DOCS / "play").iterdir()) < 60_000
