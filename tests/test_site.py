"""What the pages of the site do in a browser."""

import os
import shutil
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "docs" / "assets" / "tables.js"
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "headless no-sandbox disable-gpu no-first-run disable-background-networking disable-component-update disable-sync"
)
PAGE = """<!doctype html><div class="md-typeset"><table><thead><tr><th>method</th><th>score</th></tr></thead><tbody>
<tr><td>a</td><td>0.97 ± 0.05</td></tr><tr><td>b</td><td>1,200</td></tr><tr><td>c</td><td></td></tr>
<tr><td>d</td><td>-3</td></tr></tbody></table></div><script>{script}</script>"""


@pytest.mark.skipif(
    not ((CHROMIUM and DRIVER) or os.environ.get("CI")), reason="needs the Debian packages chromium and chromium-driver"
)
def test_a_column_of_numbers_is_sorted_by_its_heading_with_empty_cells_last(tmp_path: Path) -> None:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    (tmp_path / "page.html").write_text(PAGE.replace("{script}", SCRIPT.read_text()))
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS.split(), "disable-quic", "disable-dev-shm-usage"):
        options.add_argument(f"--{flag}")
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        driver.get((tmp_path / "page.html").as_uri())
        [button] = driver.find_elements("css selector", "th button")  # that of the numbers: names are not sorted
        for order, expected in (("ascending", "dabc"), ("descending", "badc")):
            button.click()
            rows = driver.find_elements("css selector", "tbody td:first-child")
            assert "".join(row.text for row in rows) == expected
            assert driver.find_element("css selector", "th[aria-sort]").get_attribute("aria-sort") == order
    finally:
        driver.quit()
