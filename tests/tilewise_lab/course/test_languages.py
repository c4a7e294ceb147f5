"""Chinese beside English: the same cells, the same formulas, the same code; and formulas that a terminal can show."""

from __future__ import annotations

import ast
import re

import pytest

from tilewise_lab import cli, language
from tilewise_lab.docs import lessons as docs_lessons
from tilewise_lab.learn import check, formulas, play
from tilewise_lab.learn.course import chosen, lessons

LESSONS = lessons()
CHINESE = re.compile(r"[\u4e00-\u9fff]")


@pytest.fixture(autouse=True)
def own_files(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWISE_PROGRESS", str(tmp_path / "progress.json"))
    monkeypatch.setenv("TILEWISE_LANG", "en")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("one", LESSONS, ids=lambda one: one.path.stem)
def test_both_languages_have_the_same_cells_and_formulas(one):
    """Each cell of words stands right beside its translation; what it calculates and names is the same in both."""
    words = [cell for cell in one.all_cells if cell.lang]
    assert [cell.lang for cell in words] == ["en", "zh"] * (len(words) // 2)
    for en, zh in zip(words[::2], words[1::2], strict=True):
        where = f"{one.path.name}:{en.line}"
        assert one.all_cells.index(zh) == one.all_cells.index(en) + 1, where
        assert set(formulas.formulas(en.text)) == set(formulas.formulas(zh.text)), where
        assert re.findall("^#+", en.text, re.M) == re.findall("^#+", zh.text, re.M), where
        assert en.text.count("**Exercises.**") == zh.text.count("**练习。**"), where
        assert set(re.findall(r"`[^`]+`", en.text)) == set(re.findall(r"`[^`]+`", zh.text)), where
        assert CHINESE.search(zh.text), where
        assert not CHINESE.search(en.text), where


@pytest.mark.parametrize("one", LESSONS, ids=lambda one: one.path.stem)
def test_every_formula_can_be_shown(one):
    for cell in one.all_cells:
        if cell.lang:
            assert cell.text.count("$") % 2 == 0, cell.line
            shown = formulas.for_terminal(cell.text)
            assert "$" not in shown, cell.line
            assert "\\" not in shown, cell.line


def test_every_formula_is_latex_that_others_can_read():
    """What makes the pages of the documentation is asked, where it is installed."""
    math = pytest.importorskip("docutils.utils.math.latex2mathml")
    for one in LESSONS:
        for cell in one.cells:
            for formula in formulas.formulas(cell.text if cell.lang else ""):
                assert "<math" in math.tex2mathml(formula), f"{one.path.name}:{cell.line}"


def test_no_lesson_speaks_of_notes_that_its_reader_has_not_seen():
    for one in LESSONS:
        assert "notes" not in one.path.read_text("utf-8"), one.path.name


@pytest.mark.parametrize(
    ("latex", "plain"),
    [
        (r"\frac{a + b}{c}", "(a + b) / c"),
        (r"\frac{\exp(x_i - k)}{\sum_j \exp(x_j)}", "exp(xᵢ - k) / (Σⱼ exp(xⱼ))"),
        (r"\partial p_j / \partial s_k", "∂ pⱼ / ∂ sₖ"),
        (r"W_i^Q \to \mathbb{R}^n", "Wᵢ^Q → ℝⁿ"),
        (r"\left\lceil N / B \right\rceil \le 2^{10}", "⌈ N / B ⌉ ≤ 2¹⁰"),
        (r"\begin{aligned} a &= 1 \\ bcd &= 2 \end{aligned}", "a   = 1\nbcd = 2"),
        (r"\begin{pmatrix} a & b \\ c & d \end{pmatrix}", "[a  b; c  d]"),
    ],
)
def test_a_formula_as_text(latex, plain):
    assert formulas.text(latex) == plain


def test_an_unknown_command_is_refused():
    with pytest.raises(ValueError, match=r"\\nosuch"):
        formulas.text(r"\nosuch{x}")


def test_the_language_is_the_systems_or_what_was_asked_for(monkeypatch, capsys):
    monkeypatch.delenv("TILEWISE_LANG")
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    assert language.language() == "en"
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    assert language.language() == "zh"
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    assert language.language() == "en"
    monkeypatch.setenv("TILEWISE_LANG", "en")  # put back after the test, whatever --lang makes of it
    assert cli.main(["learn", "--lang", "zh"]) == 0
    said = capsys.readouterr().out
    assert "在线 softmax" in said
    assert "已完成 0 /" in said


def test_words_and_hints_are_chinese_where_asked_for(capsys, tmp_path):
    assert cli.main(["learn", "3", "--exercise", "--lang", "zh"]) == 0
    handed = (tmp_path / "exercise_03.py").read_text("utf-8")
    assert "第 3 课" in handed
    assert "Lesson 3" not in handed
    assert all("还没写" in one.words for one in check.verdicts(3, tmp_path / "exercise_03.py"))
    (tmp_path / "answer.py").write_text("def merge(a, b):\n    return max(a[0], b[0]), a[1] + b[1]")
    assert cli.main(["learn", "--check", "3", "answer.py"]) == 1
    assert "以不同的最大值为基准" in capsys.readouterr().out
    play.display(LESSONS[2].cells_in("zh")[0])
    assert "三遍扫描" in capsys.readouterr().out


# What is printed and is not a sentence: names of code, of dtypes, of devices, of units.
NAMES = {"dtype", "ms", "TFLOP/s", "float32", "tf32", "bfloat16", "float16", "num_stages ", "\nsm_"}
NAMES |= {"rank ", "Triton ", ", m + log l = "}
PRINTING = ("print", "show")


def called(node: ast.AST, *names: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


def printed_words(node: ast.AST):
    """The strings that a call prints as they are: not those that it says, nor those that it looks things up by."""
    for child in ast.iter_child_nodes(node):
        method = isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute)
        if called(child, "say") or method or isinstance(child, ast.Subscript | ast.FormattedValue | ast.Compare):
            continue
        if isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield child.value
        yield from printed_words(child)


@pytest.mark.parametrize("one", LESSONS, ids=lambda one: one.path.stem)
def test_what_a_lesson_prints_is_said_in_both_languages(one):
    """Each sentence in English and Chinese, with the same numbers in it."""
    nodes = list(ast.walk(ast.parse(one.path.read_text("utf-8"))))
    plain = [text for node in nodes if called(node, *PRINTING) for text in printed_words(node)]
    assert [text for text in plain if re.search("[a-z]{2}", text) and text not in NAMES] == []
    for call in [node for node in nodes if called(node, "say")]:
        en, zh = (ast.unparse(argument) for argument in call.args)
        assert CHINESE.search(zh), en
        assert not CHINESE.search(en)
        values = [
            sorted(ast.unparse(part.value) + str(part.format_spec and ast.unparse(part.format_spec)) for part in found)
            for found in ([x for x in ast.walk(a) if isinstance(x, ast.FormattedValue)] for a in call.args)
        ]
        assert values[0] == values[1], en


def test_a_lesson_run_once_for_both_languages_prints_what_each_reader_gets(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWISE_PICTURES", str(tmp_path))
    for name in ("TRITON_INTERPRET", "TILEWISE_PICTURES"):  # which `record` changes
        monkeypatch.setenv(name, "0")
    docs_lessons.record(2, str(tmp_path))
    alone: list[str] = []
    with language.using("zh"):
        play.run(LESSONS[1], quiet=True, printed=alone)
    en, zh = (docs_lessons.printed(tmp_path, 2, lang) for lang in ("en", "zh"))
    assert zh == alone
    assert "用当时的最大值：l = 2.386195，而不是 1.203438" in "".join(zh)
    assert "with the maximum of the moment: l = 2.386195 instead of 1.203438" in "".join(en)
    assert not CHINESE.search("".join(en))
    rows = [[re.findall(r"\d+(?:\.\d+)?", line) for line in "".join(text).splitlines()] for text in (en, zh)]
    assert rows[0] == rows[1]


def test_a_trace_is_shown_in_the_readers_language(capsys):
    with language.using("zh"):
        assert cli.main(["trace", "softmax", "3", "2", "5", "1"]) == 0
    said = capsys.readouterr().out
    assert "同样的，但不修正" in said
    assert "每个元素，安全 softmax 读 3 次" in said
    assert "1.185122" in said


@pytest.mark.parametrize("one", LESSONS, ids=lambda one: one.path.stem)
def test_a_reader_sees_code_that_speaks_one_language(one):
    for cell in [cell for cell in one.cells if cell.kind == "code"]:
        en, zh = cell.read_in("en"), cell.read_in("zh")
        assert not re.search(r"\bsay\b", en + zh)
        assert not CHINESE.search(en)
        assert bool(CHINESE.search(zh)) == bool(CHINESE.search(cell.text))
        compile(en, "lesson", "exec")
        compile(zh, "lesson", "exec")


@pytest.mark.parametrize("one", LESSONS, ids=lambda one: one.path.stem)
def test_exercises_are_in_both_languages(one):
    source = one.beside("exercises").read_text("utf-8")
    en, zh = chosen(source, "en"), chosen(source, "zh")
    assert not CHINESE.search(en)
    assert f"第 {one.number} 课" in zh
    assert f"Lesson {one.number}" in en
    for n in (1, 2, 3):
        assert len(re.findall(rf'"""Exercise {n}[.,] ', en)) == len(re.findall(rf'"""练习 {n}[。，]', zh)) >= 1
    code = [re.sub(r'""".*?"""', "", text, flags=re.S) for text in (en, zh)]
    assert code[0] == code[1]
    for text in (en, zh):
        compile(text, "exercise", "exec")
    hints = one.beside("checks").read_text("utf-8")
    assert len(CHINESE.findall(hints)) > 100
    for call in [node for node in ast.walk(ast.parse(hints)) if called(node, "compare")]:
        words = " ".join(printed_words(ast.Tuple(call.args[:1])))
        assert not re.search(r"[a-z]{2} [a-z]{2}", words), f"{words}: code, or both languages"
        for mistake in [node for node in call.args[3:] if isinstance(node, ast.Tuple)]:
            _, en, zh = map(ast.unparse, mistake.elts)
            assert CHINESE.search(zh), en
            assert not CHINESE.search(en)
