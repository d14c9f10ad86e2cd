"""The animation of the front page: `python -m research.benches.writing` writes docs/writing.gif.

The base of the main job answers the first held-out puzzles that it solves in low-confidence order, greedily: above in that
order, where the surest blank is next, and below from left to right, by the same weights.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont

from minidrl import sampler
from minidrl.run import checkpoints
from minidrl.tasks import held_out, verdicts
from minidrl.tasks.text import decode, encode_prompts
from research.benches.orders import ORDERS, settings_of

OUT = Path(__file__).parents[2] / "docs/writing.gif"
PUZZLES, STEP, PAUSE = 3, 330, 2200  # how many; milliseconds for a step, and for a finished answer
CELL, LEFT, TOP, ROW = 44, 22, 84, 118  # pixels
INK, QUIET, LINE, NEW, OLD = "#222222", "#777777", "#cccccc", "#0072B2", "#cfe3f1"
VERDICTS = {True: ("right", "#009E73"), False: ("wrong", "#D55E00")}
TITLES = {"low_confidence": "a diffusion model: the surest blank first", "left_to_right": "the same model, from left to right"}


def font(size: int, bold: bool = False) -> ImageFont.FreeTypeFont:
    weight = "bold" if bold else "normal"
    return ImageFont.truetype(font_manager.findfont(font_manager.FontProperties(family="DejaVu Sans", weight=weight)), size)


@torch.no_grad()
def written(order: str, count: int = 60) -> list[tuple[str, str, list[int], bool]]:
    """(prompt, answer, the step of each of its characters, whether it is right) of the first held-out puzzles."""
    settings = settings_of(order)
    network, tok = checkpoints.load(settings.model)
    problems = held_out(settings.task, count)
    prompt, mask = encode_prompts(tok, problems, settings.task.prompt_length)
    greedy = dataclasses.replace(settings.sampler, temperature=0.0)
    rollout = sampler.generate(network.eval(), prompt, mask, greedy, eos_token_id=tok.eos_token_id, generator=None)
    texts = decode(tok, rollout.response)
    right = [verdict.solved for verdict in verdicts(settings.task, problems, texts)]
    asked = [f"{', '.join(map(str, p.numbers))}  make {p.target}" for p in problems]
    return list(zip(asked, texts, rollout.unmask_step.tolist(), right, strict=True))


def frame(shown: dict[str, tuple], step: int, length: int) -> Image.Image:
    """What stands before `step`; the character of the step before is dark."""
    image = Image.new("RGB", (2 * LEFT + length * CELL, TOP + 2 * ROW - 24), "white")
    draw = ImageDraw.Draw(image)
    draw.text((LEFT, 14), shown[ORDERS[0]][0], font=font(26, bold=True), fill=INK)
    for k, order in enumerate(ORDERS):
        _, text, when, right = shown[order]
        y = TOP + k * ROW
        draw.text((LEFT, y - 24), TITLES[order], font=font(16), fill=QUIET)
        for i in range(length):
            box = (LEFT + i * CELL, y, LEFT + (i + 1) * CELL - 4, y + CELL)
            there, new = when[i] < step, when[i] == step - 1
            character = (text + "\N{END OF PROOF}" * length)[i] if there else ""
            draw.rounded_rectangle(box, 5, fill=NEW if new else OLD if there else "white", outline=LINE)
            middle = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
            draw.text(middle, character, font=font(24), fill="white" if new else INK, anchor="mm")
        if step > length:
            said, color = VERDICTS[right]
            draw.text((LEFT + length * CELL - 4, y - 26), said, font=font(18, bold=True), fill=color, anchor="ra")
    return image


def main() -> None:
    found = {order: written(order) for order in ORDERS}
    length = settings_of(ORDERS[0]).sampler.length
    solved = [i for i, (*_, right) in enumerate(found[ORDERS[0]]) if right][:PUZZLES]
    frames, times = [], []
    for i in solved:
        for step in range(length + 2):
            frames.append(frame({order: found[order][i] for order in ORDERS}, step, length).quantize(32))
            times.append(PAUSE if step > length else STEP)
    frames, times = frames[-1:] + frames[:-1], times[-1:] + times[:-1]  # where nothing moves, a finished answer is seen
    frames[0].save(OUT, save_all=True, append_images=frames[1:], duration=times, loop=0, optimize=True)


if __name__ == "__main__":
    main()
