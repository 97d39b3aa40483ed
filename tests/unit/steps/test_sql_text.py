"""The text of a statement is read as PostgreSQL reads it, or refused."""

import pytest

from reefknot.steps.inputs import Refusal
from reefknot.steps.sql_text import numbered, read, refuse_several


@pytest.mark.parametrize(
    ("query", "word"),
    [
        ("SELECT 1", "select"),
        ("  \n-- a; drop\n/* b; drop */ (select) 1", "select"),
        ("((table t))", "table"),
        ("/**/copy t to '/x'", "copy"),
        ("-- x\rCOPY t TO STDOUT\n SELECT 1", "copy"),
        ("(" * 50_000 + "select" + ")" * 50_000, "select"),
        ("\u00a0select 1", "\u00a0select"),
        ('"select" 1', ""),
        ("'select'", ""),
    ],
)
def test_the_first_word_is_found_behind_comments_and_brackets(query: str, word: str) -> None:
    assert read(query).word == word


@pytest.mark.parametrize(
    ("query", "called"),
    [
        ('SELECT f(1), G (2), "H"(3), s.i(4), j/**/(5), k -- x\n(6)', "f g H i j k"),
        ("SELECT 'f(1)', $$g(2)$$, $a$h(3)$b$ $a$, \"i(4)\" -- j(5)", ""),
        (r"SELECT '\', f(1), '\'", "f"),
        (r"SELECT E'\', f(1), \'', g(2)", "g"),
        ("SELECT E'''', f(1), E''", "f"),
        ("SELECT a$b$c(1), $1$x$, f(2) $x$", "a$b$c"),
        ("SELECT 1f(2), 1e5, $1f(3)", "f"),
        ("SELECT U&'\\0061', f(1)", "f"),
        ("SELECT u&1, f(1)", "f"),
        ("SELECT x'ff', b'1', n'f(1)', g(1)", "g"),
        ('SELECT É(1), "a""b"(2)', 'É a"b'),
    ],
)
def test_names_in_front_of_brackets_are_found_and_texts_are_none(query: str, called: str) -> None:
    assert read(query).called == set(called.split())
    assert read('SELECT t.a, (t).B, t . "C", 1.5, d').fields == {"a", "b", "C"}, "names behind dots"


@pytest.mark.parametrize(
    "query",
    [
        *("/* they /* nest */ */ copy", "/*" * 5000, "SELECT 'x", 'SELECT "x', "SELECT E'x\\'", "SELECT $a$ x $b$"),
        *('SELECT U&"f"(1)', "SELECT E'a'\n'\\', f(1) --'", "SELECT 1)", "(SELECT 1", "SELECT 1) SELECT (1"),
        *("--only", "", ";", "/* */"),
    ],
)
def test_a_text_that_two_readers_could_read_differently_is_refused(query: str) -> None:
    with pytest.raises(Refusal, match="query: "):
        read(query)


def test_a_second_statement_is_refused_and_a_semicolon_at_the_end_is_none() -> None:
    refuse_several(read("SELECT ';' AS \";\" ; ; -- done;"))
    with pytest.raises(Refusal, match="more than one statement"):
        refuse_several(read("SELECT 1; SELECT 2"))


ANSWER = 'WITH "reefknot answer" AS MATERIALIZED (\n'


@pytest.mark.parametrize(
    ("query", "begins"),
    [
        ("SELECT 1; -- x", f"{ANSWER}SELECT 1\n)"),
        ("INSERT INTO t VALUES (1) RETURNING a", f"{ANSWER}INSERT"),
        ("WITH a AS (SELECT 1) SELECT 2", f"WITH a AS (SELECT 1) \n, {ANSWER[5:]}SELECT 2\n)"),
        ("WITH a (x) AS (SELECT 1) (SELECT 2)", f"WITH a (x) AS (SELECT 1) \n, {ANSWER[5:]}("),
        ("WITH a AS (SELECT 1), insert AS (SELECT 2) TABLE a", "WITH a AS (SELECT 1), insert AS (SELECT 2) \n,"),
        ("WITH RECURSIVE a AS (SELECT 1) CYCLE x SET y USING z SELECT 2", f"{ANSWER}W"),
    ],
)
def test_rows_are_bounded_by_one_more_with_query(query: str, begins: str) -> None:
    bounded = read(query).bounded(100)

    assert bounded is not None
    assert bounded.startswith(begins)
    assert "<= 100 THEN" in bounded


@pytest.mark.parametrize(
    "query",
    [
        *("INSERT INTO t VALUES (1)", "UPDATE t SET a = 'returning'", "CREATE TABLE t (a INTEGER)"),
        "WITH a AS (DELETE FROM t RETURNING b) INSERT INTO t SELECT b FROM a",
    ],
)
def test_a_statement_that_answers_nothing_stays_as_it_is(query: str) -> None:
    assert read(query).bounded(100) is None


def test_placeholders_become_numbers() -> None:
    assert numbered("SELECT %s, '%%', %s", [1, 2]) == ("SELECT $1, '%', $2", [1, 2])
    assert numbered("SELECT %(b)s, %(a)s, %(b)s", {"a": 1, "b": 2, "c": 3}) == ("SELECT $1, $2, $1", [2, 1])
    assert numbered("SELECT 'a%'", None) == ("SELECT 'a%'", [])


@pytest.mark.parametrize(
    ("query", "parameters"),
    [
        *(("SELECT %s", []), ("SELECT 1", [1]), ("SELECT %(a)s", {}), ("SELECT %(a)s", [1]), ("SELECT %s", {"a": 1})),
        *(("SELECT %x", [1]), ("SELECT %", [1]), ("SELECT %(a)", {"a": 1}), ("SELECT 5 % 2", [])),
    ],
)
def test_placeholders_and_values_that_do_not_fit_are_refused(query: str, parameters: object) -> None:
    with pytest.raises(Refusal, match="params: "):
        numbered(query, parameters)  # type: ignore[arg-type] # a list or a dict
