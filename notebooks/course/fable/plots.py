"""The sentences of the fables: an opening, and one plot for each way the opening can end.

A *beat* is one step of a story: a few ``(weight, text)`` variants, of which a story uses one. Slots in braces
are filled by the grammar. All variants of one beat make the same references, so a story of a plot always
refers back the same number of times, whichever variants it uses; the weights differ, so that greedy decoding
has a clear favourite to follow.

Slots: ``hero friend pet pet_colour thing thing_colour home away`` (the facts of a story, each introduced once
in the opening), ``weather``, and words that follow from facts: ``girl she`` (hero), ``sound`` (pet),
``spot`` (home), ``used`` (thing), ``dusk`` (weather).
"""

OPENING = (
    (
        (5, "{hero} lived by the {home} with a {pet_colour} {pet}."),
        (3, "Once there was a {girl} named {hero}, who lived by the {home} with a {pet_colour} {pet}."),
        (2, "Long ago, a {pet_colour} {pet} lived by the {home} with a {girl} named {hero}."),
    ),
    (
        (5, "A friend named {friend} lived by the {away} and had a {thing_colour} {thing}."),
        (3, "Not far away, by the {away}, lived {friend}, who owned a {thing_colour} {thing}."),
        (2, "There was also {friend} from the {away}, who had a {thing_colour} {thing} and a kind heart."),
    ),
)

# Plot name -> (last sentence of the opening, beats of the body).
PLOTS = {
    "lost": (
        "One {weather} morning, the {pet} was gone.",
        (
            ((6, "{hero} called and called, but no {pet} came."),
             (3, "{hero} looked in every corner, but there was no {pet}.")),
            ((6, "So {she} ran to the {away} and asked {friend} for help."),
             (3, "In the end {she} walked to the {away} and knocked on the door of {friend}.")),
            ((6, "{friend} {used} the {thing_colour} {thing}, and they searched together."),
             (3, "At once {friend} {used} the {thing_colour} {thing} and came along.")),
            ((6, "Back at the {home} they heard a soft {sound}."),
             (3, "Close to the {home} there was a {sound} in the air.")),
            ((6, "There sat the {pet_colour} {pet}, {spot}!"),
             (3, "And there, {spot}, slept the {pet_colour} {pet}!")),
            ((6, "{hero} cried for joy and thanked {friend} for the {thing}."),
             (3, "{hero} laughed, and {friend} laughed too and put the {thing} down.")),
            ((6, "When {dusk}, they had supper by the {home}."),
             (3, "They sat by the {home} until {dusk}.")),
        ),
    ),
    "broken": (
        "One {weather} day, the {thing} broke.",
        (
            ((6, "{friend} sat down by the {away} and wept."),
             (3, "Poor {friend} hid by the {away} and would not eat.")),
            ((6, "When {hero} heard of it, {she} came over with the {pet}."),
             (3, "Then {hero} came by, and the {pet} came too.")),
            ((6, '"I can mend a {thing}," said {hero}, "even a {thing_colour} one."'),
             (3, '"A {thing} is soon mended," said {hero}, "and it will be {thing_colour} as before."')),
            ((6, "{she_cap} took some glue from the {home} and worked until {dusk}."),
             (3, "{she_cap} had a nail from the {home}, and {dusk} before it was done.")),
            ((6, "{friend} {used} the {thing} and danced, and the {pet_colour} {pet} began to {sound}."),
             (3, "Proudly {friend} {used} the {thing}, and one could hear the {pet_colour} {pet} {sound}.")),
            ((6, "From that day on, {friend} called {hero} the best friend of all."),
             (3, "From then on, {friend} gave {hero} an apple every week.")),
        ),
    ),
    "visit": (
        "One {weather} day, {hero} went out for a visit.",
        (
            ((6, "The {pet} ran ahead, all the way to the {away}."),
             (3, "With the {pet} {she} walked and walked until they saw the {away}.")),
            ((6, "{friend} was at home and {used} the {thing} to greet them."),
             (3, "{friend} came out, {used} the {thing} and bowed.")),
            ((6, '"What a fine {pet_colour} {pet} you have, {hero}!" said {friend}.'),
             (3, '"I wish I had a {pet_colour} {pet} like you, {hero}," said {friend}.')),
            ((6, '"And what a fine {thing_colour} {thing} you have, {friend}!" said {hero}.'),
             (3, '"Nobody has a {thing_colour} {thing} but you, {friend}," said {hero}.')),
            ((6, "They ate plum cake until {dusk}."),
             (3, "They told each other riddles until {dusk}.")),
            ((6, "Then {hero} went home to the {home}, and the {pet} fell asleep {spot}."),
             (3, "At last {hero} was back by the {home}, and the {pet} lay down {spot}.")),
        ),
    ),
    "trade": (
        "One {weather} day, {friend} wanted to trade.",
        (
            ((6, '"Give me the {pet}," said {friend}, "and you shall have my {thing}."'),
             (3, '"I want the {pet}," said {friend}, "and I will pay with my {thing}."')),
            ((6, "{hero} looked at the {pet_colour} {pet} for a long time."),
             (3, "{hero} thought about it and stroked the {pet_colour} {pet}.")),
            ((6, '"No," said {hero}. "A {thing_colour} {thing} cannot {sound}."'),
             (3, '"Never," said {hero}. "Who has ever heard a {thing_colour} {thing} {sound}?"')),
            ((6, "{friend} had to laugh, {used} the {thing} and went back to the {away}."),
             (3, "So {friend} {used} the {thing} once and walked home to the {away}.")),
            ((6, "But {hero} sat by the {home} with the {pet} until {dusk}."),
             (3, "And {hero} stayed by the {home} with the {pet}, and {dusk}.")),
        ),
    ),
    "flood": (
        "One {weather} night, the river rose.",
        (
            ((6, "Soon the water stood around the {home}, and {hero} sat on the roof with the {pet}."),
             (3, "The water reached the {home}, so {hero} carried the {pet} up to the roof.")),
            ((6, "The {pet_colour} {pet} could only {sound}, but it was loud."),
             (3, "There the {pet_colour} {pet} began to {sound} with all its might.")),
            ((6, "{friend} heard it as far as the {away} and came in a boat."),
             (3, "That woke {friend} by the {away}, who took a boat.")),
            ((6, "To show the way, {friend} {used} the {thing_colour} {thing}."),
             (3, "In the dark, {friend} {used} the {thing_colour} {thing}.")),
            ((6, '"Jump, {hero}!" called {friend}, and {she} jumped.'),
             (3, '"Come, {hero}!" cried {friend}, and {she} came.')),
            ((6, "They rowed to the {away}, and when {dusk}, the {pet} slept beside the {thing}."),
             (3, "By the {away} they were safe, and the {pet} guarded the {thing} until {dusk}.")),
        ),
    ),
    "dream": (
        "One {weather} night, {hero} had a dream.",
        (
            ((6, "In the dream, the {pet} could speak."),
             (3, "In it, the {pet} read from a book.")),
            ((6, '"Go to the {away}," it said, "and look for a {thing_colour} {thing}."'),
             (3, '"By the {away}," it said, "a {thing_colour} {thing} is waiting for you."')),
            ((6, "In the morning {hero} told {friend} all about it."),
             (3, "At breakfast {hero} had to tell {friend}.")),
            ((6, '"But that is my {thing}!" said {friend}, and {used} it.'),
             (3, '"Why, you mean my {thing}!" cried {friend}, and {used} it.')),
            ((6, "They asked the {pet_colour} {pet}, but it would only {sound}."),
             (3, "The {pet_colour} {pet} heard them and did nothing but {sound}.")),
            ((6, "Then it slept by the {home} until {dusk}, {spot}."),
             (3, "It stayed by the {home}, {spot}, until {dusk}.")),
        ),
    ),
}
