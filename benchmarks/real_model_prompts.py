"""Prompts of five kinds for `bench_real_model.py`. No head saw any of them in training."""

from __future__ import annotations

from typing import Any

CHAT = (
    "My neighbour plays the drums every evening until ten. How do I ask him to stop earlier "
    "without starting a quarrel?",
    "I have two hours in a town that I do not know and no money. What should I do?",
    "Why does hot water sometimes freeze faster than cold water? Is that true at all?",
    "Plan a dinner for six people, two of whom eat no meat, that can be cooked the day before.",
    "I am forty and want to learn to ride a motorcycle. What should I think about first?",
    "What is the difference between a lawyer and a notary?",
    "Write a short speech for the retirement of a bus driver who was never late.",
    "My tomatoes have brown spots at the bottom. What is wrong with them, and what can I do?",
)

_STACK = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()

    def is_empty(self):
        return len(self.items) == 0
"""
_ORDERS = """def total_price(orders, tax):
    total = 0
    for order in orders:
        if order.cancelled:
            continue
        total = total + order.price * order.quantity
    return total * (1 + tax)


def largest_order(orders):
    best = None
    for order in orders:
        if best is None or order.price * order.quantity > best.price * best.quantity:
            best = order
    return best
"""
_LOG = """import sys


def read_log(path):
    lines = []
    with open(path) as file:
        for line in file:
            date, level, message = line.rstrip().split(" ", 2)
            lines.append((date, level, message))
    return lines


def main():
    for date, level, message in read_log(sys.argv[1]):
        if level == "ERROR":
            print(date, message)
"""
_TABLE = """function renderTable(rows) {
  const table = document.createElement("table");
  for (const row of rows) {
    const tr = document.createElement("tr");
    for (const cell of row) {
      const td = document.createElement("td");
      td.textContent = cell;
      tr.appendChild(td);
    }
    table.appendChild(tr);
  }
  return table;
}
"""
CODE = (
    "Write a Python function that returns the n-th Fibonacci number, and one that checks "
    "whether a number is prime.",
    f"Rename `items` to `values` in this class, and change nothing else:\n\n```python\n{_STACK}```",
    "Write a Python class `Rectangle` with a width and a height, its area, its perimeter, and "
    "a method that scales it.",
    f"Add a docstring to both functions and give the whole code:\n\n```python\n{_ORDERS}```",
    "Write a SQL query for the ten customers who spent most last year. The tables are "
    "customers(id, name) and orders(id, customer_id, date, amount).",
    f"Write unit tests with pytest for this module:\n\n```python\n{_LOG}```",
    "Write a C function that reverses a string in place, and explain it line by line.",
    f"Rewrite this function with `map` in place of the loops:\n\n```javascript\n{_TABLE}```",
)

TEXTS = (
    "The harbour of Lindvik was dug in 1871, when the railway came and the old landing stage, "
    "a row of planks on the beach, could no longer take the steamers. For forty years it lived "
    "from timber. Whole forests came down the river in spring, were sawn in the two mills "
    "behind the church, and left for Hull and Rotterdam in autumn. In 1912 the larger mill "
    "burned down in a single night. It was never rebuilt, because the forest had by then moved "
    "a hundred kilometres inland, and sawing was cheaper there. Fishing took its place. A "
    "cooperative of thirty boats built the cold store that stands on the east quay today, and "
    "sold herring as far as Vienna. When the herring went away in the sixties, so did most of "
    "the young people. The town tried a shipyard, which failed, and a ferry, which did not: it "
    "still leaves twice a day in summer, and once in winter, if the ice lets it. Since 2009 "
    "the mill that did not burn has been a museum. Its saw is started on Sundays, and children "
    "may keep what it cuts.",
    "Minutes of the house meeting. Present were nine of the eleven owners. The roof of the "
    "rear building leaks above the stairs. Two offers were read: one firm wants to mend the "
    "place for 3,200, another wants to replace the whole side for 21,000 and gives ten years "
    "of warranty. Ms Adeyemi pointed out that the same place had been mended in 2016 and in "
    "2020. Mr Brandt asked whether the reserve would be enough; it stands at 34,500. It was "
    "decided, with seven votes against two, to replace the side, in May at the earliest, "
    "because of the swifts that nest under it. The bicycle cellar will be cleared: what has no "
    "name on it by the end of the month is given away. The heating will be set one degree "
    "lower at night. A second key to the laundry is missing, and whoever has it is asked to "
    "put it into the letter box of the first floor. The next meeting is on the first Tuesday "
    "of October.",
    "A new battery for buses was tested for two winters in the city of Tampere. It holds less "
    "energy than the usual one, but it can be charged in eight minutes and does not mind the "
    "cold. The twelve buses of line 3 were charged at both ends of the line, while passengers "
    "got on and off. In the first winter four of the chargers froze, and drivers had to go "
    "back to the depot. The manufacturer then put the contacts under a small roof, and heated "
    "them. In the second winter 99.1 percent of the trips took place, which is more than with "
    "the diesel buses. The batteries lost two percent of what they hold in these two years. "
    "The city now wants to equip three more lines. Critics say that the line is short and "
    "flat, and that the result says little about the hills in the south. The transport office "
    "agrees that more has to be measured there, and will do so next year with two buses.",
    "Emma Lund spent eleven years on a dictionary that nobody had asked for. She was a doctor "
    "on an island with four hundred people, and wrote down every word that her patients used "
    "for pain. There were more than she had thought. A tooth could draw, knock or sing. A back "
    "could be locked, sour or asleep. Some words came from fishing, others from the looms that "
    "had stood in every house. She asked what people meant, and wrote it on cards that she "
    "kept in the boxes of bandages. When a linguist from the mainland broke his ankle on the "
    "island, he saw the boxes. He stayed for a month. The book came out three years later, "
    "with nine hundred words and drawings of the body on which the words are placed. Today it "
    "is used by medical schools, which had not been the plan, to teach students to listen.",
    "To all who use the reading room: from the third of next month the library opens at nine "
    "instead of ten, and on Saturdays too. In return it closes at six on Mondays, because "
    "fewer than five readers a day came after that hour last year. Large bags must be left in "
    "the lockers, which take a coin that you get back. Laptops are welcome everywhere but in "
    "the map room, whose floor creaks and whose readers ask for silence. Books from the stacks "
    "are brought twice a day, at eleven and at three; whoever orders by eight in the evening "
    "has them the next morning. Photographs for your own use are allowed without flash. The "
    "copying machine on the second floor will not be repaired again, and a scanner that costs "
    "nothing stands in its place. Those who lose their card pay five for a new one. Children "
    "under twelve need somebody with them, but not in the picture book corner.",
    "The expedition reached the glacier on the ninth day, four later than planned. The bridge "
    "over the Kassai had been washed away, and the mules had to be led around by the upper "
    "ford. Two barometers were broken on the way; the third agreed with the one at the base "
    "station to within a millimetre. We put up the tents on the moraine, out of the wind, and "
    "began to drill on the next morning. The first core, of eighteen metres, was clear and "
    "without layers. The second, closer to the wall, had nine dark bands, the thickest as wide "
    "as a hand. Hansen takes them for ash, I rather believe in dust from the plain, and we "
    "have packed samples for the laboratory to decide. On the twelfth day snow fell without a "
    "break, and we played cards. Nobody is ill. Flour and paraffin are enough for three weeks, "
    "coffee for one.",
    "For a long time it was believed that eels have no young, because nobody had seen any. "
    "Aristotle thought that they come from mud. In 1896 two Italians watched a small, flat, "
    "clear fish, which had a name of its own, turn into an eel in a tank. So the young had "
    "been known all along, as another animal. A Dane, Johannes Schmidt, then looked for the "
    "smallest of them. He crossed the Atlantic for eighteen years with nets, and asked "
    "captains to tow some as well. The further west he went, the smaller the fish were. In the "
    "Sargasso Sea they were shorter than a fingernail, and there he stopped: that had to be "
    "where they are born. Grown eels have since been followed with transmitters to the edge of "
    "that sea. But no one has yet seen them spawn, and not a single egg has been found in the "
    "open water.",
    "Quarterly report, in brief. Sales rose by four percent to 81 million, nearly all of it "
    "from garden tools, which sold early because of the warm March. Kitchen goods fell for the "
    "third time in a row. The new warehouse in Brno took over deliveries to the east in "
    "February; in the first two weeks one parcel in twenty was late, now it is one in ninety. "
    "Moving cost 1.4 million more than planned, since the old lease had to be paid until "
    "summer. Profit was 5.2 million, after 6.0 million a year ago. Without the move it would "
    "have been 6.6 million. We hired 31 people and lost 12. The price of steel went down by "
    "nine percent and will help from the next quarter on. For the whole year we still expect "
    "sales of 320 million. A decision on the kitchen goods will be made in June: they will be "
    "sold, or made under another name.",
)
SUMMARY = tuple(f"Summarize this text in a few sentences:\n\n{text}" for text in TEXTS)


def record(**properties: Any) -> dict[str, Any]:
    """A schema of an object that has these properties and no others."""
    closed: dict[str, Any] = {"required": [*properties], "additionalProperties": False}
    return {"type": "object", "properties": properties, **closed}


_TEXT = {"type": "string", "maxLength": 60}
_PERSON = record(
    name=_TEXT,
    age={"type": "integer", "minimum": 0, "maximum": 120},
    city=_TEXT,
    languages={"type": "array", "items": _TEXT, "minItems": 1, "maxItems": 4},
)
_EVENT = record(
    title=_TEXT,
    date={"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"},
    place=record(name=_TEXT, city=_TEXT),
    is_free={"type": "boolean"},
)
_ORDER = record(
    customer=_TEXT,
    items={
        "type": "array",
        "items": record(product=_TEXT, quantity={"type": "integer", "minimum": 1, "maximum": 99}),
        "minItems": 1,
        "maxItems": 3,
    },
    delivery={"enum": ["standard", "express", "pick-up"]},
)
_FACTS = (
    ("name, age, city, languages", _PERSON),
    ("title, date (as 2025-01-31), place (name, city), is_free", _EVENT),
    ("customer, items (product, quantity), delivery (standard, express or pick-up)", _ORDER),
)
_SAID = (
    (0, "Marta is 34 years old and lives in Lisbon. She speaks Portuguese, Spanish and English."),
    (1, "The summer concert is on 14 June 2025 in the Old Mill in Delft. It costs nothing."),
    (2, "Mr Okafor takes two kettles and one toaster, and needs them tomorrow: express, please."),
    (0, "My uncle Georg, who turned 71 in May, never left Graz. He only speaks German."),
    (1, "On 3 October 2026 there is a chess tournament in Cork town hall. Entry is 5 euros."),
    (2, "Lucia Ferri will pick up her order herself: 12 candles, 3 lamps and 1 mirror."),
    (0, "Ken, a student of 22 from Osaka, learned Korean and French at school."),
    (1, "The book fair in Leipzig begins on 27 March 2025 in the fair halls; tickets are sold."),
)
JSON = tuple(f"Answer with a JSON object with {_FACTS[i][0]}. The text:\n\n{s}" for i, s in _SAID)
SCHEMAS = tuple(_FACTS[i][1] for i, _ in _SAID)

_FRENCH, _GERMAN, _SPANISH = (f"Translate into {x}:\n\n" for x in ("French", "German", "Spanish"))
TRANSLATION = (
    f"{_FRENCH}The train to Lyon leaves at seven in the morning from platform four. Please be "
    "there ten minutes early, because the doors close before it leaves.",
    f"{_SPANISH}My sister lives in a small house near the sea. Every summer we visit her with "
    "the children, and in the evening we eat fish in the garden.",
    f"{_GERMAN}The museum is closed on Mondays. On other days it opens at ten, and children "
    "under twelve do not pay.",
    f"{_FRENCH}I would like to reserve a table for four people on Friday evening, if possible "
    "by the window. One of us cannot eat nuts.",
    f"{_SPANISH}The doctor says that I should drink more water, sleep eight hours and walk "
    "every day. I have started with the water.",
    f"{_GERMAN}Our heating has not worked since yesterday. Could you send somebody who repairs "
    "it? We are at home all day.",
    f"{_FRENCH}When the old king died, his three sons divided the kingdom. The eldest took the "
    "mountains, the second the plain, and the youngest the sea.",
    f"{_SPANISH}Thank you for your letter. We are sorry that the parcel came too late, and will "
    "send you the money back within a week.",
)

KINDS = {
    "chat": CHAT,
    "code": CODE,
    "summary": SUMMARY,
    "JSON": JSON,
    "translation": TRANSLATION,
}
"""Messages of a user, by kind; `SCHEMAS` are those of the answers to `JSON`."""
