"""`tilewise learn`: how FlashAttention works, in lessons that run.

tilewise learn                       the lessons, and how far you are
tilewise learn 3                     lesson 3, cell by cell
tilewise learn 3 --checks            with its folded cells: checks, code of figures
tilewise learn 3 --exercise          its three exercises, as a file to fill in
tilewise learn --check 3 answer.py   grade your answers (within 30 s; --limit 120 gives them more)
tilewise learn 3 --solution          one way to solve them
tilewise learn 3 --lang zh           in Chinese (en: English; else as LANG says)
tilewise learn --notebooks FOLDER    all of them as Jupyter notebooks
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path

from tilewise.errors import AttentionError


def configure(parser: ArgumentParser) -> None:
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.description = __doc__
    parser.add_argument("lesson", nargs="?", type=int)
    parser.add_argument("--exercise", action="store_true", help="write the lesson's exercises to a file here")
    parser.add_argument("--check", nargs=2, metavar=("LESSON", "FILE"), help="grade answers")
    parser.add_argument(
        "--limit", type=float, default=30, metavar="SECONDS", help="stop --check after this time (default: %(default)s)"
    )
    parser.add_argument("--solution", action="store_true", help="print one")
    parser.add_argument("--lang", choices=("en", "zh"), help="the language of lessons, exercises and hints")
    parser.add_argument("--notebooks", type=Path, metavar="FOLDER", help="write the lessons as Jupyter notebooks")
    parser.add_argument("--quiet", action="store_true", help="run the code, print only what it prints")
    parser.add_argument(
        "--checks", action="store_true", help="show the folded cells, too: checks, and the code of figures"
    )
    parser.add_argument("--pause", action="store_true", help="wait for Enter between cells")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="run it quietly, keep what each cell prints as JSON"
    )
    parser.add_argument(
        "--measure", type=Path, metavar="FILE", help="run the course's measurements on this GPU, keep them"
    )
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="of the measurements, these")


def run(options: Namespace) -> int:
    from tilewise_lab import language
    from tilewise_lab.learn import check, lab, notebook, play

    if options.lang:
        language.use(options.lang)
    if options.notebooks:
        return notebook.write_all(options.notebooks)
    if options.check:
        number, answer = options.check
        if not number.isdigit():
            raise AttentionError("--check", repr(number), "the number of a lesson, then the file of an answer")
        return check.grade(int(number), Path(answer), options.limit)
    if options.measure:
        return lab.measure_all(options.measure, options.only)
    if options.lesson is None:
        return play.contents()
    if options.exercise:
        return check.hand_out(options.lesson)
    if options.solution:
        return check.reveal(options.lesson)
    shown = {"quiet": options.quiet, "pause": options.pause, "checks": options.checks}
    return play.play(options.lesson, **shown, record=options.record)
