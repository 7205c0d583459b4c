"""Built-in prompts: templates, written by us, with random fields.

<topic> draws from the list of that name, <3-9> draws a number. A field that occurs twice in a prompt is drawn once;
<name'> differs from <name>. A drawn text may have fields itself. No prompt is from a benchmark.
"""

import random
import re
from collections.abc import Iterator

from saguaro.errors import ConfigError

PER_TEMPLATE = 1000  # distinct prompts used per template; every template has many more


def seed_prompts(n: int, seed: int = 0) -> list[str]:
    """n distinct prompts, determined by the seed; a smaller n gives a prefix.

    >>> seed_prompts(3) == seed_prompts(5)[:3], len(set(seed_prompts(200)))
    (True, 200)
    """
    if not 0 <= n <= MOST_PROMPTS:
        raise ConfigError(f"{n} seed prompts; there are {MOST_PROMPTS}: take fewer, or give prompts of your own")
    each = [_distinct(template, random.Random(f"{seed} {template}")) for template in TEMPLATES]
    order = random.Random(f"{seed} order")
    prompts: list[str] = []
    while len(prompts) < n:
        # Reshuffled in each pass, so that other settings that cycle over the prompts are not tied to templates.
        order.shuffle(each)
        prompts += [next(drawn) for drawn in each]
    return prompts[:n]


def fill(template: str, rng: random.Random) -> str:
    """A template with its fields filled in.

    >>> fill("<2-2> and <2-2>", random.Random(0))
    '2 and 2'
    """
    drawn: dict[str, str] = {}

    def value(match: re.Match[str]) -> str:
        field = match[1]
        if field not in drawn:
            drawn[field] = _draw(field, drawn, rng)
        return drawn[field]

    while _FIELD.search(template):
        template = _FIELD.sub(value, template)
    return template


_FIELD = re.compile(r"<([a-z]+'?|\d+-\d+)>")


def _draw(field: str, drawn: dict[str, str], rng: random.Random) -> str:
    if field[0].isdigit():
        low, high = field.split("-")
        return str(rng.randint(int(low), int(high)))
    twin = field[:-1] if field.endswith("'") else field + "'"
    return rng.choice([value for value in LISTS[field.rstrip("'")] if value != drawn.get(twin)])


def _distinct(template: str, rng: random.Random) -> Iterator[str]:
    """Distinct prompts of one template."""
    seen = set[str]()
    while True:
        prompt = fill(template, rng)
        if prompt not in seen:
            seen.add(prompt)
            yield prompt


def _split(text: str) -> list[str]:
    return [" ".join(entry.split()) for entry in text.split(";")]


TEMPLATES = [
    # knowledge
    "Explain <topic> to <reader>.",
    "What should everybody know about <topic>? Answer in <2-9> sentences.",
    "Write a short encyclopedia entry on <topic>, about <60-240> words.",
    "Summarise what is known about <topic> and what is still disputed, for <reader>.",
    "Compare <topic> and <topic'>: what do they have in common, and where do they differ?",
    "Define <topic> in one sentence, then give <2-6> examples that <reader> would understand.",
    "Which <3-8> misunderstandings about <topic> are common? Correct each one, as you would for <reader>.",
    "How did people think about <topic> a hundred years ago, and what has changed? Write for <reader>.",
    "I read something about <topic> yesterday. Ask me <2-6> questions, in a <tone> manner, to find out what I"
    " understood.",
    "Why does <topic> matter to a <job>?",
    "Give me a timeline of <4-9> important moments in connection with <topic>, in a form that suits <reader>.",
    "You told me about <topic> before. Now I wonder how it is connected with <topic'>. Can you go on from there?",
    # opinions and decisions
    "List <3-7> advantages and <2-6> disadvantages of <topic>.",
    "<name> thinks that people talk too much about <topic>; <name'> disagrees. Write their dialogue in <6-14> lines.",
    "Should a small town spend money on <topic>? Weigh the arguments in a <tone> voice and reach a conclusion.",
    "Write an opening statement for a debate. Motion: schools should spend more time on <topic> than on <topic'>.",
    "<name> wants to make a habit of <habit>, but always stops after <2-9> days. What could help?",
    "Help me to choose a present for a <job> who likes <topic>. I can spend <15-90> euros.",
    # instructions
    "How do I deal with <problem>? I have a <thing> and <10-90> minutes.",
    "Give step-by-step instructions for <dish> for <2-8> people, without <food>.",
    "What can I cook with <food>, <food'> and some spices in <15-60> minutes?",
    "Plan <2-7> days in <place> for a <job> who is interested in <topic>.",
    "Make a checklist of <5-12> points for opening <shop> in <place>.",
    "Write a weekly schedule for a <job> who wants to learn about <topic> in <2-9> hours a week.",
    "I am new to <topic> and have <2-9> hours a week. What are the first <3-7> steps, and which mistakes should I"
    " avoid?",
    "Write instructions for a game for <3-12> players that needs only a <thing> and some <goods>.",
    # lists and formats
    "Name <3-12> facts about <topic> as a numbered list, the most surprising one first.",
    "Make a table with <3-6> rows on <topic> for <reader>. The columns are: aspect, short explanation, example.",
    "Give me <3-9> titles for a <mood> podcast about <topic>.",
    'Answer in JSON only, with the keys "title", "summary" and "keywords" (<3-8> of them):'
    " what does a <job> know about <topic>?",
    "Write a JSON array of <2-5> invented customers of <shop> in <place>. Each has a name, an age above <18-60> and a"
    " list of hobbies.",
    "Write <3-8> quiz questions about <topic> with four choices each for <reader>, and mark the right answers.",
    "Which of these does not belong, and why: <topic>, <topic'>, a <thing>, a <thing'>?",
    # stories and verse
    "Write a <mood> story of about <80-260> words in which a <job> finds a <thing> in <place>.",
    "Write a poem of <4-16> lines about <topic>. Make it <mood>.",
    "Tell a fable in which a <animal> and a <animal'> quarrel over a <thing>. End with a moral.",
    "Continue this <mood> story: When <name> unlocked <shop> that morning, the <thing> was gone, and on the floor lay",
    "Write the first page of a diary of a <job> who moves to <place> and knows nobody but <name>.",
    "Invent a riddle for <reader> whose answer is: a <thing>. It should sound <mood> and have <2-6> lines.",
    "Here is a riddle: I am found near a <job>, I am no <thing>, and a <animal> fears me. Suggest <2-5> possible"
    " answers.",
    "Write <2-5> haiku about <topic>, one of them <mood>.",
    "Write a scene for two actors, <name> and <name'>, who are stuck in a lift with a <thing> and talk about <topic>.",
    # roles
    "You are a <tone> <job>. A visitor asks you about <topic>. What do you say?",
    "Pretend to be a <animal> that knows a lot about <topic>, and introduce yourself in <3-8> sentences.",
    "Act as an interviewer for a job as a <job>. Ask one question about <topic>, then judge a weak and a strong"
    " answer.",
    # letters and rewriting
    "Write an email from <name> to <name'>. The aim: <errand>. Keep it <tone>.",
    "Rewrite what <name> says in a <tone> way: <saying>, and nobody has done anything about it.",
    "Translate for <name> into <language>, then explain the grammar of the translation briefly: <saying>.",
    "How does one say this in <language> and in <language'>? <saying>.",
    "Correct the mistakes and explain them: <name> have went to <place> for buy <2-30> <goods>, but it were closed.",
    "Write an advertisement of <30-120> words for <shop> in <place>, in a <tone> style.",
    # reading
    "Summarise in <2-4> sentences:\n\n<passage>",
    "Read the text and answer: who did what, where, and when?\n\n<passage>",
    "<passage>\n\nList the people and places of this text, and give it a <mood> title.",
    "<passage>\n\nWhat might happen next? Write <2-6> more sentences in the same style.",
    "<name> wrote a review. Is it positive, negative or mixed? Give the reason in <2-4> sentences.\n\n<review>.",
    "Sort these remarks into praise, complaint and small talk, and answer both briefly.\n1. <review>.\n2. <saying>.",
    # arithmetic
    "<name> buys <3-24> <goods> at <2-19> euros each and pays with <5-9> notes of 100 euros. How much change is due?",
    "A <job> packs <goods> into boxes of <6-16>. There are <140-960> <goods> in the morning, and <17-88> more come at"
    " noon. How many full boxes are there in the evening, and how many <goods> remain?",
    "<name> has <12-60> <goods>. <name'> has <2-5> times as many and gives <6-11> of them to <name>. How many does"
    " each of them have now?",
    "A train to <place> covers <80-95> kilometres in the first hour and <100-130> in each of the next <2-5> hours."
    " How far does it go altogether, and what is its mean speed?",
    "On each of <5-7> days a week <shop> in <place> takes in <210-890> euros, and it pays <350-990> euros of rent and"
    " wages a week for each of <2-4> people. What is left after <3-8> weeks? Show your steps.",
    "In a class of <24-36> pupils a third likes <topic>, <3-7> like <topic'>, and the rest likes neither. How many"
    " pupils like neither? If the number does not come out even, say so.",
    "A recipe for <dish> serves <2-5> people and needs <120-480> grams of <food>. How much does <name> need for"
    " <6-15> people, and what does it cost at <3-14> euros per kilogram?",
    "<name> reads <11-39> pages of a book about <topic> every day and <2-3> times as many on Sundays. The book has"
    " <240-880> pages. After how many weeks is it finished?",
    # programs
    "Write a Python function that <task>. Add a docstring and <2-4> tests about <data>.",
    "Write a JavaScript function `<verb>Items` that <task>, and show how to call it on a list of <data>.",
    "Write a Python class `<class>` with methods to add, remove and <verb> <data>, for at most <10-90> entries.",
    "Complete the Python function.\n\n<stub>",
    "<stub>",
    "Explain line by line what this does and name one case in which it fails:\n\n<snippet>",
    "Write an SQL query on a table `<table>` with the columns id, name, <column> and <column'>: the <3-20> names with"
    " the highest <column>, for each <column'>.",
    "A table `<table>` has a column `<column>` with missing values. Show in SQL how to count them by `<column'>`, and"
    " how to replace them by <0-99>.",
    "Write a shell command that finds all files with `<data>` in their name that are older than <2-60> days and"
    " larger than <1-50> MB, and explain its options.",
    "Write a regular expression for the number of a box of <goods>: it has <2-6> capital letters, a hyphen and <3-9>"
    " digits, and test it in Python on <data>.",
]
MOST_PROMPTS = PER_TEMPLATE * len(TEMPLATES)

_STUBS = [
    '''from typing import List


def longer_than(<data>: List[str], limit: int = <3-9>) -> List[str]:
    """ Return the entries of <data> with more than limit characters, shortest first.
    >>> longer_than(["pear", "fig", "tangerine"], 3)
    ['pear', 'tangerine']
    """
''',
    '''def seats_left(rows: int, booked: list[tuple[int, int]], width: int = <6-40>) -> int:
    """ A hall for <topic> has rows of the given width. Each booking is (row, number of seats).
    Return how many seats are free; a row that is overbooked counts as full.
    >>> seats_left(2, [(0, 4)], width=5)
    6
    """
''',
    '''def moving_mean(<data>: list[float], n: int = <2-12>) -> list[float]:
    """Mean of each n neighbouring values; an empty list if there are fewer than n.

    >>> moving_mean([1.0, 3.0, 5.0], n=2)
    [2.0, 4.0]
    """
''',
    '''def clock(minutes: int) -> str:
    """ Write minutes after midnight as a time of day, as <name> does on the plan for <topic>.
    >>> clock(75)
    '01:15'
    >>> clock(24 * 60 + <1-9>)
    '00:0<1-9>'
    """
''',
    '''def change(cents: int, coins=(50, 20, 10, 5, <2-3>, 1)):
    """
    Return how many of each coin <name> gives back for <goods>, largest coins first.
    Coins that are not needed are left out.
    Example: change(70) should be {50: 1, 20: 1}
    """
''',
    '''def merge_<data>(old: dict, new: dict) -> dict:
    """ Merge two dictionaries of <data>. Where both have a key, the larger value stays, unless
    it is above <100-999>; then the smaller one does.
    >>> merge_<data>({"a": 1, "b": 5}, {"b": 2, "c": 3})
    {'a': 1, 'b': 5, 'c': 3}
    """
''',
    '''import math


def tiles(width: float, depth: float, side: float = 0.<20-90>) -> int:
    """How many square tiles cover the floor of <shop>; cut tiles are not used twice.

    >>> tiles(2.0, 1.0, side=0.5)
    8
    """
''',
    '''class <class>:
    """Keeps at most <3-40> <data> and forgets the oldest first."""

    def __init__(self) -> None:
        self.items = []

    def add(self, item):
        """Add an item; return what was forgotten, or None."""
''',
    '''def next_bus(now: str, timetable: list[str]) -> str | None:
    """ Times are written 'HH:MM'. Return the first bus to <place> at or after now that leaves <name>
    at least <2-9> minutes to walk, or None if there is none today.
    """
''',
    '''from typing import Dict, List


def by_initial(<data>: List[str]) -> Dict[str, List[str]]:
    """ Group <data> by their first letter, ignoring case. Skip empty strings and those of more
    than <10-60> letters.
    >>> by_initial(["Oak", "elm", "olive"])
    {'o': ['Oak', 'olive'], 'e': ['elm']}
    """
''',
    '''def garden_path(moves: str) -> tuple[int, int]:
    """A <animal> starts at (0, 0) and walks N, S, E or W. Return where it is after the moves.
    A digit repeats the move before it that often, at most <4-9> times.

    >>> garden_path("NNE")
    (1, 2)
    """
''',
    '''def water_level(rain: list[float], leak: float = 0.<1-9>, full: float = <5-50>.0) -> list[float]:
    """ Level of the barrel of <name> after each day: rain is added, then the leak is taken away.
    It is never below zero and never above full.
    """
''',
]
_SNIPPETS = [
    "def f(<data>):\n    out = {}\n    for x in <data>:\n        out[x] = out.get(x, 0) + <1-9>\n    return out",
    "const pick = (<data>) => <data>.filter((x, i) => i % <2-9> === 0).map((x) => x * <2-20>);",
    "SELECT <column>, COUNT(*) FROM <table> GROUP BY <column> HAVING COUNT(*) > <2-50> ORDER BY 2 DESC;",
    "while len(<data>) > <2-40>:\n    <data>.pop(0)\nprint(sum(<data>) / len(<data>))",
    "for (let i = <1-9>; i < <data>.length; i += <2-7>) {\n  console.log(<data>[i].trim());\n}",
    "UPDATE <table> SET <column> = <column> * 1.<10-45> WHERE <column'> IS NOT NULL;",
    "def g(n):\n    if n < <2-9>:\n        return n\n    return g(n - 1) + g(n // <2-5>)",
    "with open('<data>.txt') as file:\n    lines = [line.split(',')[<1-6>] for line in file if line.strip()]",
]

LISTS = {
    "topic": _split("""
        photosynthesis; black holes; plate tectonics; the water cycle; vaccines; antibiotics; the human heart; sleep;
        dreams; memory; the immune system; genes; evolution; volcanoes; earthquakes; tides; lightning; rainbows;
        magnets; gravity; the speed of light; atoms; the periodic table; crystals; bees; whales; octopuses; migrating
        birds; ants; mushrooms; cacti; rainforests; coral reefs; deserts; glaciers; solar panels; wind turbines;
        batteries; electric cars; steam engines; bridges; submarines; telescopes; satellites; the Moon; Mars; comets;
        the Roman Empire; ancient Egypt; the Silk Road; the Vikings; medieval castles; the printing press; the
        Industrial Revolution; the French Revolution; the Renaissance; the Cold War; the Olympic Games; pirates;
        samurai; the Great Wall of China; the Inca; lighthouses; the history of writing; calendars; coins; democracy;
        elections; constitutions; courts of law; taxes; inflation; interest rates; credit cards; mortgages; the stock
        market; insurance; budgeting; saving for retirement; supply and demand; small businesses; advertising; job
        interviews; remote work; public speaking; time management; teamwork; negotiation; learning a language; note
        taking; school uniforms; homework; libraries; museums; online courses; social media; smartphones; passwords;
        spam; search engines; artificial intelligence; robots; computer viruses; cloud storage; databases; binary
        search; sorting algorithms; recursion; linked lists; hash tables; version control; unit tests; compilers;
        operating systems; web browsers; encryption; open-source software; video games; chess; football; tennis;
        marathon running; swimming; cycling; yoga; rock climbing; hiking; camping; fishing; gardening; compost;
        houseplants; knitting; photography; painting; pottery; poetry; detective novels; fairy tales; theatre; opera;
        jazz; the violin; the piano; drums; choirs; film music; dancing; sourdough bread; cheese; chocolate; coffee;
        tea; olive oil; rice; soup; pasta; spices; street food; breakfast; vegetarian cooking; healthy snacks;
        vitamins; drinking water; stress; back pain; allergies; first aid; train journeys; airports; hotels; city
        maps; islands; mountains; national parks; road trips; public transport; traffic jams; architecture; furniture;
        recycling; plastic waste; climate change; weather forecasts; winter; autumn leaves; thunderstorms; dogs; cats;
        horses; pet fish; birthdays; weddings; friendship; honesty; courage; patience; good manners; neighbours;
        grandparents
    """),
    "name": _split("""
        Amara; Bruno; Chiara; Dmitri; Elif; Farid; Greta; Hiro; Ines; Jonas; Kavya; Leif; Mirela; Noor; Otto; Priya;
        Quentin; Rosa; Soren; Tomasz; Ulla; Viktor; Wanda; Ximena; Yusuf; Zofia; Callum; Deepa; Emeka; Freya
    """),
    "place": _split("""
        Lisbon; Kyoto; Nairobi; Reykjavik; Montreal; Hanoi; Cusco; Prague; Marrakesh; Edinburgh; Seoul; Buenos Aires;
        Helsinki; Istanbul; Cape Town; Vienna; Melbourne; Oaxaca; Dublin; Jaipur; Bergen; Ljubljana; Wellington;
        Athens
    """),
    "job": _split("""
        nurse; carpenter; pilot; beekeeper; librarian; baker; plumber; gardener; teacher; taxi driver; journalist;
        chef; firefighter; tailor; farmer; museum guide; software developer; bank clerk; sailor; midwife; judge;
        locksmith
    """),
    "thing": _split("""
        clock; bicycle; mirror; key; candle; ladder; suitcase; kettle; lamp; compass; blanket; drum; rope; spoon;
        bell; notebook; telescope; kite; backpack; chair; bucket; camera; lantern
    """),
    "animal": _split("""
        fox; wolf; tortoise; heron; badger; goat; raven; hedgehog; beaver; donkey; squirrel; frog; crane; mole; bear;
        cat
    """),
    "mood": _split("""
        cheerful; gloomy; mysterious; funny; tender; suspenseful; nostalgic; hopeful; dreamy; dramatic; quiet; playful
    """),
    "tone": _split("""
        formal; friendly; playful; neutral; confident; polite; dramatic; very simple; poetic; businesslike; warm;
        sober
    """),
    "reader": _split("""
        a six-year-old; a teenager; a grandparent; a complete beginner; a busy manager; a first-year student; a
        tourist; a curious neighbour; someone who dislikes the subject; a primary school class; a new colleague; a
        journalist
    """),
    "language": _split("""
        French; Spanish; German; Italian; Portuguese; Dutch; Swedish; Polish; Turkish; Japanese; Latin; Danish
    """),
    "goods": _split("""
        notebooks; apples; marbles; tickets; candles; postcards; eggs; bricks; pencils; oranges; stickers; mugs;
        plants; cookies; scarves; batteries; seashells; buttons; chairs; bottles
    """),
    "dish": _split("""
        lentil soup; vegetable curry; apple pie; mushroom risotto; potato salad; banana bread; chicken stew; tomato
        sauce; pancakes; fish tacos; roast pumpkin; hummus; rice pudding; spinach lasagne; onion tart; fried rice;
        bean chilli; oat biscuits; cucumber salad; noodle soup
    """),
    "food": _split("""
        potatoes; eggs; chickpeas; spinach; carrots; rice; yoghurt; mushrooms; tomatoes; oats; lemons; cabbage; tuna;
        walnuts; peppers; bread; apples; cream cheese; leeks; tofu
    """),
    "shop": _split("""
        a bakery; a bookshop; a bicycle workshop; a flower shop; a small cinema; a tea house; a repair café; a music
        school; a toy shop; a climbing hall; a pottery studio; a language school; a garden centre; a barber shop
    """),
    "habit": _split("""
        getting up early; drinking less coffee; reading every evening; walking to work; cooking at home; keeping a
        diary; stretching in the morning; writing down expenses; eating more fruit; practising an instrument; putting
        the phone away; going to bed on time; learning ten words a day; tidying the desk
    """),
    "problem": _split("""
        a dripping tap; a slow laptop; a squeaky door; a flat bicycle tyre; a noisy neighbour; a late parcel; mouldy
        bread; a blocked drain; a lost passport; a wilting plant; a fogged-up mirror; a burnt pan; a missed train; a
        stuck zip; a cat that scratches the sofa; a colleague who interrupts; a printer that does not print; a wine
        stain
    """),
    "errand": _split("""
        move Thursday's meeting to Monday; return a faulty <thing>; ask for two days off; book a table for <4-12>
        people; thank them for their help with <topic>; invite them to a talk on <topic>; remind them of an unpaid
        bill; apologise for a late delivery of <goods>; ask for a price for <20-400> <goods>; recommend a book on
        <topic>; cancel a subscription; ask about a job as a <job>; report <problem>; offer to organise an evening
        about <topic>
    """),
    "saying": _split("""
        The last bus leaves at ten past eleven; We would like a room with a view of the harbour; My <thing> is older
        than I am; The <job> forgot the <thing> at home; It has not rained here since March; Could you tell me where
        the museum is; She reads about <topic> every night; The <animal> sleeps behind the shed; I have never been to
        <place> in winter; Please bring some <goods> to the party; The soup tastes better on the second day; He talks
        about <topic> all the time; Nobody noticed that the <thing> was missing; The children found <3-20> <goods> in
        the attic
    """),
    "review": _split("""
        The <thing> arrived two days early and works well, though the handle feels cheap; I waited <20-90> minutes for
        <dish> and it was cold when it came; The guide in <place> knew everything about <topic> and made us laugh;
        This course on <topic> repeats itself and the sound is poor; I have used this <thing> daily for <2-9> years;
        Nice colour, wrong size, and nobody answers the phone; The hotel in <place> was clean but the street was loud;
        My <job> friend recommended this <thing> and I regret listening; The <dish> alone is worth the trip to
        <place>; It does what it should, no more and no less; A book about <topic> that I could not put down; After
        <2-9> weeks the <thing> broke, but the shop replaced it without a question
    """),
    "passage": _split("""
        <name> opened <shop> in <place> in <1961-2015>. At first only neighbours came, and in the second winter the
        roof leaked so badly that <name> had to sell a <thing> to pay for the repair. Then a <job> from <place'> wrote
        about it, and within <2-9> months there were queues at the door. Today <3-18> people work there, and every
        year they hold an evening about <topic>.; The town council of <place> met on Tuesday to discuss <topic>.
        <name>, a <job>, asked for a budget of <12-95> thousand, but <name'> found that too much and proposed to begin
        with half. After <2-5> hours they agreed to start with a trial of <3-9> months, to count visitors, and to
        decide again in the spring.; Last summer <name> and <name'> travelled from <place> to <place'> by train. On
        the way they lost a <thing>, shared <dish> with a retired <job>, and missed a connection by <2-9> minutes.
        They spent the night in the station reading about <topic>. "It was the best part," said <name>, "because
        nobody could reach us."; An old <job> kept <12-60> <goods> in a shed and told nobody why. When <name> asked,
        the answer was always about <topic>. One morning the shed was empty, and on the door hung a <thing> with a
        note: take what you need, and leave something for <name'>.; A survey of <210-980> people in <place> asked
        about <topic>. <12-48> per cent said that they know a lot about it, most of them older than <40-60>. Younger
        people named <topic'> as more important. The authors, led by <name>, warn that the answers were collected
        online and in a single week.
    """),
    "verb": _split("""
        count; collect; filter; group; merge; validate; reverse; deduplicate; rank; normalise; partition; summarise
    """),
    "data": _split("""
        words; prices; scores; dates; temperatures; user_names; orders; coordinates; lines; tags; durations; ratings;
        invoices; file_names; intervals; votes
    """),
    "task": _split("""
        returns the words of a text that have more than <3-9> letters; keeps one of every <2-6> elements of a list;
        computes the moving average of a list over <2-9> values; finds the first line of a text that is indented by
        <2-8> spaces; turns a number of seconds into hours, minutes and seconds; counts how many words of each length
        a text has; tells how many values of a list are within <2-50> of its median; merges two sorted lists into one;
        converts a temperature between Celsius and Fahrenheit; splits a list into parts of length <2-9>; finds all
        pairs of numbers in a list that add up to <10-99>; deals a list of cards to <2-7> players in turn; reads a CSV
        file and returns the mean of column <2-9>; checks whether two words are anagrams; writes a number between 1
        and <20-99> in words; shortens a text to <20-90> characters at the end of a word; draws a triangle of stars
        with <3-12> rows; returns the longest run of equal elements; computes the area of a polygon of <3-9> corners;
        tells whether a year is a leap year; parses a date such as 2021-<10-12>-<10-28> and returns its weekday;
        groups a list of dictionaries by a key; flattens a list nested <2-5> levels deep; turns snake_case names into
        camelCase; validates an e-mail address; simulates <10-90> throws of a die and counts the sixes; transposes a
        matrix given as a list of rows; compares two lists and returns what was added and what was removed; computes
        compound interest over <3-30> years; generates a random password of <8-24> characters; lays out a list of
        words in <2-6> columns
    """),
    "table": _split("""
        employees; orders; books; flights; patients; invoices; recipes; tickets; students; products; rentals; matches
    """),
    "column": _split("""
        city; price; created_at; status; rating; quantity; category; country; weight; duration; discount; score
    """),
    "class": _split("""
        Account; Library; Timer; Inventory; Playlist; Calendar; Elevator; Parcel; Garden; Counter; Thermostat; Queue;
        Robot; Recipe; Ticket; Scoreboard
    """),
    "stub": _STUBS,
    "snippet": _SNIPPETS,
}
