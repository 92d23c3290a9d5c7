"""What the pages of the site do in a browser."""

from pathlib import Path

from browser import browser, in_browser

SCRIPT = Path(__file__).parents[2] / "docs" / "assets" / "tables.js"
PAGE = """<!doctype html><div class="md-typeset"><table><thead><tr><th>method</th><th>score</th></tr></thead><tbody>
<tr><td>a</td><td>0.97 ± 0.05</td></tr><tr><td>b</td><td>1,200</td></tr><tr><td>c</td><td></td></tr>
<tr><td>d</td><td>-3</td></tr></tbody></table></div><script>{script}</script>"""


@in_browser
def test_a_column_of_numbers_is_sorted_by_its_heading_with_empty_cells_last(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(PAGE.replace("{script}", SCRIPT.read_text()))
    with browser() as driver:
        driver.get((tmp_path / "page.html").as_uri())
        [button] = driver.find_elements("css selector", "th button")  # that of the numbers: names are not sorted
        for order, expected in (("ascending", "dabc"), ("descending", "badc")):
            button.click()
            rows = driver.find_elements("css selector", "tbody td:first-child")
            assert "".join(row.text for row in rows) == expected
            assert driver.find_element("css selector", "th[aria-sort]").get_attribute("aria-sort") == order
