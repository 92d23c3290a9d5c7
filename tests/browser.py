"""Pages as people see them, in a real browser."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = ("headless", "no-sandbox", "disable-gpu", "no-first-run", "disable-background-networking")
FLAGS += ("disable-component-update", "disable-sync", "disable-quic", "disable-dev-shm-usage")

# A newcomer's machine may have no browser. Where CI is set they run, and fail if there is none.
in_browser: Callable[..., Any] = pytest.mark.skipif(
    not ((CHROMIUM and DRIVER) or os.environ.get("CI")), reason="needs the Debian packages chromium and chromium-driver"
)


@contextmanager
def browser(width: int = 1000, dark: bool = False, calm: bool = False) -> Iterator[Any]:
    """A window of so many pixels, for a visitor with a dark theme, or who asked for less motion (`calm`)."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in FLAGS:
        options.add_argument(f"--{flag}")
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        view(driver, width, dark, calm)
        yield driver
    finally:
        driver.quit()


def view(driver: Any, width: int = 1000, dark: bool = False, calm: bool = False) -> None:
    """Change the window and the visitor's wishes."""
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    wishes = {
        "prefers-color-scheme": "dark" if dark else "light",
        "prefers-reduced-motion": "reduce" if calm else "no-preference",
    }
    features = [{"name": name, "value": value} for name, value in wishes.items()]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
