"""nbval with tolerances: numbers of a cell tagged `tolerance=0.02` may differ by that much; all other cells stay strict."""

import copy
import math
import re
from typing import Any

from nbval.plugin import IPyNbCell

NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?")
PADDED = re.compile(" *" + NUMBER.pattern)  # 9 and 10 in one column, to the right, have other spaces before them
_strictly = IPyNbCell.compare_outputs


def tolerance(tags: list[str]) -> float:
    """What the tags of a cell allow; 0 without such a tag. Raises: ValueError for a tag that is no number above 0."""
    found = [tag.removeprefix("tolerance=") for tag in tags if tag.startswith("tolerance")]
    if not found:
        return 0.0
    if len(found) > 1 or not re.fullmatch(NUMBER, found[0]) or not 0 < float(found[0]) < math.inf:
        raise ValueError(f"tags: got {tags}; allowed one tolerance=x, x above 0")
    return float(found[0])


def settled(text: str, stored: str, allowed: float) -> str:
    """`text` with the stored number in place of each that is within `allowed` of it; unchanged where their counts differ.

    With as many spaces before it, or, to the right of a column, as many as make up its width.
    """
    old = PADDED.findall(stored)
    if len(old) != len(PADDED.findall(text)):
        return text
    following = iter(old)

    def chosen(match: re.Match) -> str:
        number, own = next(following), match[0]
        apart = abs(float(own.replace(",", "")) - float(number.replace(",", "")))
        in_place = own.count(" ") == number.count(" ") or len(own) == len(number)
        return number if in_place and apart <= allowed * (1 + 1e-9) else own

    return PADDED.sub(chosen, text)


def _texts(output: Any) -> list[tuple[dict, str]]:
    """Where an output holds text: (the mapping, its key)."""
    places = [(output, "text")] if "text" in output else []
    return places + [(output["data"], key) for key in output.get("data", {}) if key.startswith("text/")]


def compare_outputs(self: IPyNbCell, test: list, ref: list, skip_compare: Any = None) -> bool:
    """nbval's comparison, after the numbers that the cell's tolerance allows have been settled."""
    allowed = tolerance(self.cell.metadata.get("tags", []))
    if allowed and len(test) == len(ref):
        test = copy.deepcopy(test)
        for new, old in zip(test, ref, strict=True):
            for (mine, key), (theirs, _) in zip(_texts(new), _texts(old), strict=False):
                mine[key] = settled(mine[key], theirs.get(key, ""), allowed)
    return _strictly(self, test, ref, skip_compare)


IPyNbCell.compare_outputs = compare_outputs
