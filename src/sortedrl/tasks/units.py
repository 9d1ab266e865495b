r"""Units after a number: which words are units, and how to remove them from an answer.

Only the words below are units. Anything else that follows a number is part of the answer, so `5xy`, `2pi` and
`7 is wrong` are not 5, 2 and 7. Scale words (thousand, million, ...) are not units: they multiply.
Single letters are units only if LaTeX marks them as text (`6 \text{ m}`): a bare `6m` has a variable m.
"""

import re
from dataclasses import dataclass

Unit = tuple[tuple[str, int], ...]  # words in their standard spelling with their powers, sorted

SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
PERCENT: Unit = (("percent", 1),)

# The first word is the standard spelling. Plurals with -s are added.
_MEASURES = """
degree deg; radian rad; percent; unit; point pt; time
meter metre; centimeter centimetre cm; millimeter millimetre mm; kilometer kilometre km; nanometer nm; micron
inch inches; foot feet ft; yard yd; mile mi; furlong; parsec pc; kiloparsec kpc; angstrom; au; lightyear
second sec; millisecond; minute min; hour hr; day; week; month; year yr; decade; century centuries
dollar USD buck; cent; penny pennies; dime; nickel; euro; pound lb; rupee; yuan; yen; peso
gram; kilogram kg; milligram; ton tonne; ounce oz
liter litre; milliliter millilitre ml mL; gallon gal; quart qt; pint; cup; tablespoon tbsp; teaspoon tsp; barrel
mph; kph; kmh; knot; newton; joule; kilojoule kJ; watt; kilowatt kW; kWh; calorie cal; kcal
volt; amp ampere; ohm; hertz Hz; kHz; MHz; GHz; pascal Pa; kPa; atm; kelvin; celsius; fahrenheit
mole mol; electronvolt eV; keV; MeV; GeV; erg; dyne dyn; gauss; coulomb; tesla; farad; bit; byte
"""
_LETTERS = r"""
meter m; second s; hour h; gram g; liter L l; newton N; joule J; watt W; volt V; ampere A; kelvin K; celsius C
fahrenheit F; coulomb C; tesla T; milligram mg; millisecond ms; minute min; megawatt MW; gigawatt GW; ohm \Omega
angstrom \AA; inch in
"""
_COUNTED = """
people person; student; child children; man men; woman women; boy; girl; kid; adult; friend; guest; worker; employee
customer; passenger; player; team; piece; slice; page; book; word; letter; item; object; box boxes; bag; bottle; can
pack; packet; package; pair; set; ticket; game; goal; vote; question; problem; block; step; night; trip
egg; apple; orange; banana; cookie; cake; cupcake; sandwich sandwiches; pizza; candy candies; chocolate; fruit
flower; rose; tree; plant; seed; leaf leaves; animal; dog; cat; cow; goat; bird; chicken; fish; pet; leg; wheel; car
pencil; pen; crayon; card; stamp; sticker; marble; ball; balloon; bead; toy; doll; coin; shirt; chair; seat; room
song; movie; episode; photo; serving; glass glasses; way; side; edge; vertex vertices; face; digit
triangle; square; solution; integer; element; subset; path; arrangement; move; turn
round; lap; class classes; brick; stick; tile; acre; hectare; house; floor; stair
atom; molecule; photon; electron; star; galaxy galaxies
"""


def _spellings(table: str, *, plurals: bool) -> dict[str, str]:
    """Maps every spelling to the standard one, from a table of `standard other ...; standard other ...`."""
    known: dict[str, str] = {}
    for entry in table.replace("\n", ";").split(";"):
        standard, *others = entry.split() or [""]
        for word in filter(None, (standard, *others)):
            known.setdefault(word, standard)
            if plurals and len(word) > 1:
                known.setdefault(word + "s", standard)
    return known


_BARE = _spellings(_COUNTED, plurals=True) | _spellings(_MEASURES, plurals=True)
_MARKED = _BARE | _spellings(_LETTERS, plurals=False)
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_TEXT = r"\\(?:text|mbox|mathrm|textrm|operatorname)"
_POWER = r"\^\s*(?:\{\s*-?\d\s*\}|\d)"
_TAIL_CHARACTERS = 80  # no unit is longer, and longer texts take time
_MARKED_TAIL = re.compile(rf"(?:\s*/?\s*{_TEXT}\s*\{{[^{{}}]*\}}(?:{_POWER})?)+$", re.ASCII)
_BARE_TAIL = re.compile(rf"(?<=[\d}})])\s*[A-Za-z][A-Za-z /.]*(?:{_POWER})?$", re.ASCII)
_FRACTION_TAIL = re.compile(
    rf"\\frac\s*\{{\s*{_TEXT}\s*\{{([^{{}}]*)\}}\s*\}}\s*\{{\s*{_TEXT}\s*\{{([^{{}}]*)\}}\s*\}}$"
)


@dataclass(frozen=True, slots=True)
class Quantity:
    """A parsed answer: `number` is the part before the scale word and the unit."""

    number: str
    scale: int = 1
    unit: Unit | None = None

    @property
    def percent(self) -> bool:
        return self.unit == PERCENT


def quantity(text: str) -> Quantity:
    """The answer without a unit and a scale word at its end. Other words stay."""
    number, unit = _without_unit(text)
    dollars = re.match(r"([+-]?)\s*\\\$\s*", number)
    if dollars and unit in (None, (("dollar", 1),)):
        number, unit = dollars.group(1) + number[dollars.end() :], (("dollar", 1),)
    scaled = re.search(rf"(?<=[\d}})\s])\s*(?:{_TEXT}\{{\s*)?({'|'.join(SCALES)})\s*\}}?$", number)
    if not scaled:
        return Quantity(number, 1, unit)
    return Quantity(number[: scaled.start()].strip(), SCALES[scaled.group(1)], unit)


def _without_unit(text: str) -> tuple[str, Unit | None]:
    text = re.sub(r"(?<![.\s])\s*\.?$", "", text)
    cut = max(len(text) - _TAIL_CHARACTERS, 0)
    head, tail = text[:cut], _FRACTION_TAIL.sub(r"\\text{\1/\2}", text[cut:])
    percent = re.search(r"\s*\\?%$", tail)
    if percent:
        return head + tail[: percent.start()], PERCENT
    for pattern, known in ((_MARKED_TAIL, _MARKED), (_BARE_TAIL, _BARE)):
        found = pattern.search(tail)
        if not found or not (head + tail[: found.start()]).strip():
            continue
        words = re.sub(rf"{_TEXT}\s*\{{([^{{}}]*)\}}", r" \1", found.group())
        scale = re.match(rf"\s*(?:{'|'.join(SCALES)})\b", words)
        start = scale.end() if scale else 0
        unit = _read_unit(words[start:], known)
        if unit:
            return head + tail[: found.start()] + words[:start], unit
    return text, None


def _read_unit(words: str, known: dict[str, str]) -> Unit | None:
    """`miles per hour`, `square inches`, `m/s^2`, `years old`: None if any word is not a unit."""
    powers: dict[str, int] = {}
    sign, power = 1, 1
    tokens = re.findall(rf"\\?[A-Za-z]+|/|{_POWER}|\S", re.sub(r"\b(?:each|old|of them|in total)\s*$", "", words))
    last = ""
    for token in tokens:
        if token in ("/", "per", "a", "an") and last:
            sign = -1
        elif token in _POWERS:
            power = _POWERS[token]
        elif token in known:
            last = known[token]
            powers[last] = powers.get(last, 0) + sign * power
            power = 1
        elif token.startswith("^") and last and powers[last] in (1, -1):
            powers[last] *= int(re.sub(r"[^\d-]", "", token))
        elif token != "." or not last:
            return None
    if power != 1:  # "5 square": no unit follows
        return None
    return tuple(sorted(powers.items())) or None
