"""
The text of a PostgreSQL statement, read as the server reads it: the functions it names, and where its answer begins.

What is read is what is sent: placeholders are numbered first. Whatever two readers could read differently (nested
comments, `U&` names, brackets that do not match) is refused. `SAFE_FUNCTIONS` only compute, or describe the schema;
`bounded` makes the server refuse a row that is too large, before anybody holds it.
"""

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from msgspec import Struct

from reefknot.core.failure import ErrorCode
from reefknot.steps.inputs import Refusal
from reefknot.steps.sql_rows import Parameters

TOO_LARGE = "reefknot: a row is too large"
"""Part of the server's message when a row is over the bound of `bounded`."""

_NAME = r"[A-Za-z_\x80-\U0010ffff]"
_PART = r"[A-Za-z_0-9\x80-\U0010ffff]"
_TOKEN = re.compile(
    rf"""(?P<space>[ \t\n\r\f\v]++|--[^\n\r]*+|/\*(?:[^*/]|\*(?!/)|/(?!\*))*+\*/)
    |(?P<escaped>[eE]'(?:[^'\\]|\\.|'')*+')
    |(?P<text>(?:[bBxXnN]|[uU]&)?'(?:[^']|'')*+'|\$(?P<tag>{_NAME}{_PART}*+)?\$.*?\$(?(tag)(?P=tag))\$)
    |(?P<quoted>"(?:[^"]|"")++")
    |(?P<unclear>[uU]&"|[eE]'|['"]|/\*|\$(?:{_NAME}{_PART}*+)?\$)
    |(?P<name>{_NAME}(?:{_PART}|\$)*+)
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_PLACEHOLDER = re.compile(r"%(?:\(([^)]+)\)(.?)|(.?))", re.DOTALL)
_ROWS = frozenset(("select", "values", "table"))
_CHANGES = frozenset(("insert", "update", "delete", "merge"))
_ANSWER = '"reefknot answer"'


class Token(NamedTuple):
    """A name, a literal or a single character; names as the server folds them."""

    kind: str
    text: str
    start: int
    end: int
    depth: int
    """The number of brackets around it."""

    def is_word(self, *words: str) -> bool:
        return self.kind == "name" and self.text in words

    def is_sign(self, sign: str) -> bool:
        return self.kind == "other" and self.text == sign

    @property
    def is_name(self) -> bool:
        return self.kind in ("name", "quoted")


class SqlText(Struct, frozen=True):
    """A statement that was read: comments are left out, and a semicolon at its end."""

    text: str
    tokens: tuple[Token, ...]

    @property
    def word(self) -> str:
        """The first word, brackets aside; empty for a text that does not begin with one."""
        first = next((one for one in self.tokens if not one.is_sign("(")), self.tokens[0])
        return first.text if first.kind == "name" else ""

    @property
    def called(self) -> set[str]:
        """Names in front of a bracket: functions, and the few other things that are written so."""
        pairs = pairwise(self.tokens)
        return {one.text for one, after in pairs if one.is_name and after.is_sign("(")}

    @property
    def fields(self) -> set[str]:
        """Names behind a dot: columns, and functions of one row, which may be written like columns."""
        pairs = pairwise(self.tokens)
        return {one.text for before, one in pairs if one.is_name and before.is_sign(".")}

    @property
    def names(self) -> set[str]:
        return {one.text for one in self.tokens if one.is_name}

    def bounded(self, most: int) -> str | None:
        """
        The statement, changed so that the server fails on a row of more than `most` bytes; None if it answers no rows.

        It becomes the last of its own WITH queries: changes are allowed there, and order and columns stay.
        """
        main = self._main()
        if not self._answers(main):
            return None
        begin = self.tokens[main].start if main else 0
        before = f"{self.text[:begin]}\n," if main else "WITH"
        row = f"{_ANSWER}::pg_catalog.text"
        return "\n".join(
            (
                f"{before} {_ANSWER} AS MATERIALIZED (",
                self.text[begin:],
                ') SELECT "reefknot answer".* FROM "reefknot answer"',
                f"WHERE CASE WHEN pg_catalog.octet_length({row}) <= {most} THEN 0",
                f"ELSE ('{TOO_LARGE}' || pg_catalog.left({row}, 0))::pg_catalog.int4 END = 0",
            )
        )

    def _main(self) -> int:
        """The place of the statement behind WITH queries; 0 for a statement without them."""
        if not self.tokens[0].is_word("with"):
            return 0
        for place, (before, one) in enumerate(pairwise(self.tokens), 1):
            begins = one.is_sign("(") or one.is_word(*_ROWS, *_CHANGES)
            if before.is_sign(")") and one.depth == 0 and begins:
                return place
        return 0

    def _answers(self, main: int) -> bool:
        first = self.tokens[main]
        if first.is_word("with", *_ROWS) or first.is_sign("("):
            return True
        rest = self.tokens[main:]
        return first.is_word(*_CHANGES) and any(one.depth == 0 and one.is_word("returning") for one in rest)


def read(query: str) -> SqlText:
    """The statement's tokens; a text that cannot be read for certain is refused."""
    tokens = tuple(_tokens(query))
    while tokens and tokens[-1].is_sign(";"):
        tokens = tokens[:-1]
    if not tokens:
        raise _refused("it is empty")
    for before, one in pairwise(tokens):
        if before.kind == "escaped" and one.text.startswith("'"):
            raise _refused("a literal behind an E'…' literal would continue it; write one of them")
    return SqlText(query[: tokens[-1].end], tokens)


def refuse_several(statement: SqlText) -> None:
    """Refuse a text of more than one statement. Bodies of functions and rules count as statements here."""
    if any(one.is_sign(";") for one in statement.tokens):
        raise _refused("more than one statement; accepted: one, without another after it")


def _tokens(query: str) -> Iterator[Token]:
    depth = 0
    for found in _TOKEN.finditer(query):
        kind, text = str(found.lastgroup), found[0]
        match kind:
            case "space":
                continue
            case "unclear":
                raise _refused(f"{text!r} begins what has no end, is nested, or is an escaped name; write it plainly")
            case "name":
                text = "".join(one.lower() if one.isascii() else one for one in text)
            case "quoted":
                text = text[1:-1].replace('""', '"')
            case "other" if text == ")":
                depth -= 1
        if depth < 0:
            break
        yield Token(kind, text, found.start(), found.end(), depth)
        depth += kind == "other" and text == "("
    if depth:
        raise _refused("its brackets do not match")


def numbered(query: str, parameters: Parameters) -> tuple[str, list[Any]]:
    """The query with `$1`, `$2`, … for its placeholders, and the values in that order."""
    if parameters is None:
        return query, []
    values = parameters if isinstance(parameters, list) else []
    places: dict[str, int] = {}

    def number(found: re.Match[str]) -> str:
        name, form, plain = found[1], found[2], found[3]
        if plain == "%":
            return "%"
        if (form or plain) not in ("s", "b", "t"):
            raise _wrong(f"{found[0]!r} is no placeholder; accepted: %s, %(name)s, and %% for the character")
        if (name is None) is not isinstance(parameters, list):
            raise _wrong("%s takes a list of values, %(name)s a mapping")
        if isinstance(parameters, dict) and name not in parameters:
            raise _wrong(f"{name!r} is in the query and not given")
        return f"${places.setdefault(name or str(len(places)), len(places) + 1)}"

    text = _PLACEHOLDER.sub(number, query)
    if isinstance(parameters, dict):
        values = [parameters[name] for name in places]
    elif len(places) != len(values):
        raise _wrong(f"the query has {len(places)} placeholders, and {len(values)} values were given")
    return text, values


def _refused(text: str) -> Refusal:
    return Refusal(ErrorCode.invalid_input, f"query: {text}")


def _wrong(text: str) -> Refusal:
    return Refusal(ErrorCode.invalid_input, f"params: {text}")


_SAFE = """
    # numbers
    abs acos acosd acosh asin asind asinh atan atan2 atan2d atand atanh cbrt ceil ceiling cos cosd cosh cot cotd
    degrees div erf erfc exp factorial floor gamma gcd lcm lgamma ln log log10 min_scale mod pi pow power radians
    random random_normal round scale sign sin sind sinh sqrt tan tand tanh trim_scale trunc width_bucket
    # texts and bytes
    ascii bit_count bit_length btrim casefold char_length character_length chr concat concat_ws convert convert_from
    convert_to crc32 crc32c decode encode format get_bit get_byte initcap is_normalized left length like lower lpad
    ltrim md5 normalize notlike octet_length overlay parse_ident position quote_ident quote_literal quote_nullable
    regexp_count regexp_instr regexp_like regexp_match regexp_matches regexp_replace regexp_split_to_array
    regexp_split_to_table regexp_substr repeat replace reverse right rpad rtrim set_bit set_byte sha224 sha256 sha384
    sha512 split_part starts_with string_to_array string_to_table strpos substr substring to_ascii to_bin to_hex
    to_oct translate unicode_assigned unistr upper
    # times
    age clock_timestamp date_add date_bin date_part date_subtract date_trunc extract isfinite justify_days
    justify_hours justify_interval make_date make_interval make_time make_timestamp make_timestamptz now overlaps
    statement_timestamp timeofday timezone to_char to_date to_number to_timestamp transaction_timestamp
    # types written like functions
    bit bool box bpchar bytea char cidr circle date float4 float8 int2 int4 int8 interval line lseg macaddr macaddr8
    money name numeric oid path point polygon regclass text time timestamp timestamptz timetz varbit varchar xid xml
    # aggregates and windows
    any_value array_agg avg bit_and bit_or bit_xor bool_and bool_or corr count covar_pop covar_samp cume_dist
    dense_rank every first_value lag last_value lead max min mode nth_value ntile percent_rank percentile_cont
    percentile_disc range_agg range_intersect_agg rank regr_avgx regr_avgy regr_count regr_intercept regr_r2
    regr_slope regr_sxx regr_sxy regr_syy row_number stddev stddev_pop stddev_samp string_agg sum var_pop var_samp
    variance xmlagg
    # arrays, ranges, enumerations, rows
    array_append array_cat array_dims array_fill array_length array_lower array_ndims array_position array_positions
    array_prepend array_remove array_replace array_reverse array_sample array_shuffle array_sort array_to_string
    array_upper cardinality datemultirange daterange enum_first enum_last enum_range generate_series
    generate_subscripts int4multirange int4range int8multirange int8range isempty lower_inc lower_inf multirange
    num_nonnulls num_nulls nummultirange numrange range_merge trim_array tsmultirange tsrange tstzmultirange
    tstzrange unnest upper_inc upper_inf
    # JSON and XML
    array_to_json json_agg json_agg_strict json_array_elements json_array_elements_text json_array_length
    json_build_array json_build_object json_each json_each_text json_extract_path json_extract_path_text json_object
    json_object_agg json_object_agg_strict json_object_agg_unique json_object_agg_unique_strict json_object_keys
    json_populate_record json_populate_recordset json_strip_nulls json_to_record json_to_recordset json_typeof
    jsonb_agg jsonb_agg_strict jsonb_array_elements jsonb_array_elements_text jsonb_array_length jsonb_build_array
    jsonb_build_object jsonb_each jsonb_each_text jsonb_extract_path jsonb_extract_path_text jsonb_insert
    jsonb_object jsonb_object_agg jsonb_object_agg_strict jsonb_object_agg_unique jsonb_object_agg_unique_strict
    jsonb_object_keys jsonb_path_exists jsonb_path_exists_tz jsonb_path_match jsonb_path_match_tz jsonb_path_query
    jsonb_path_query_array jsonb_path_query_array_tz jsonb_path_query_first jsonb_path_query_first_tz
    jsonb_path_query_tz jsonb_populate_record jsonb_populate_recordset jsonb_pretty jsonb_set jsonb_set_lax
    jsonb_strip_nulls jsonb_to_record jsonb_to_recordset jsonb_typeof row_to_json to_json to_jsonb xml_is_well_formed
    xml_is_well_formed_content xml_is_well_formed_document xmlcomment xmlexists xmltext xpath xpath_exists
    # full text; ts_stat and ts_rewrite run text, and are not among them
    array_to_tsvector json_to_tsvector jsonb_to_tsvector numnode phraseto_tsquery plainto_tsquery querytree setweight
    strip to_tsquery to_tsvector ts_delete ts_filter ts_headline ts_rank ts_rank_cd tsquery_phrase tsvector_to_array
    websearch_to_tsquery
    # shapes, networks, identifiers
    abbrev area bound_box broadcast center diagonal diameter family height host hostmask inet_merge inet_same_family
    isclosed isopen masklen netmask network npoints pclose popen radius set_masklen slope width gen_random_uuid
    uuid_extract_timestamp uuid_extract_version uuidv4 uuidv7
    # the schema and the session, described
    bernoulli col_description current_database current_schema current_schemas current_setting current_user
    format_type has_column_privilege has_schema_privilege has_table_privilege obj_description pg_collation_for
    pg_column_size pg_database_size pg_get_constraintdef pg_get_expr pg_get_indexdef pg_get_viewdef pg_indexes_size
    pg_input_is_valid pg_relation_size pg_size_bytes pg_size_pretty pg_table_is_visible pg_table_size
    pg_total_relation_size pg_typeof session_user system to_regclass to_regtype version
"""
SAFE_FUNCTIONS = frozenset(word for line in _SAFE.splitlines() if "#" not in line for word in line.split())
"""Built-in functions that a connection for reading may call: they run no text, and reach no file, lock or message."""
