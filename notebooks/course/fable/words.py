"""The words of the fables: who, what and where, and the small facts that hang on them.

Every pool is closed, and words of different kinds never coincide, so a word in a text tells its kind.
Colours begin with consonants: no sentence needs "an".
"""

GIRLS = (
    "Ada Anna Bella Birgit Clara Dora Edith Elsa Fiona Freya Greta Hanna Hilda Ida Ines Jolanda Juno Kira "
    "Lena Lotte Lucia Marta Matilda Mira Nadia Nora Olga Ottilie Paula Petra Rosa Ronja Sara Selma Tilda "
    "Thea Ursula Vera Wanda Zora"
).split()
BOYS = (
    "Adam Albin Anton Basil Boris Caspar Conrad David Edgar Emil Felix Florian Gustav Hannes Hugo Ivo Jakob "
    "Jonas Karl Konstantin Lars Leo Ludwig Magnus Marek Milo Nils Odo Oskar Pavel Peter Rafael Ruben Samuel "
    "Simon Theodor Tobias Viktor Walter Yannick"
).split()

COLOURS = "red blue green yellow white black grey brown golden silver purple pink".split()

# What an animal says, as a noun and as a verb.
ANIMALS = {"bear": "growl", "cat": "purr", "cow": "moo", "crow": "caw", "donkey": "bray", "duck": "quack",
           "fox": "yap", "frog": "croak", "goat": "bleat", "goose": "honk", "hen": "cluck", "hound": "howl",
           "mouse": "squeak", "parrot": "screech", "pig": "grunt", "pony": "neigh"}

# Where one hides at a place.
PLACES = {"bakery": "beside the warm oven", "barn": "deep in the hay", "bridge": "below the stone arch",
          "castle": "in front of the gate", "chapel": "behind the altar", "forge": "next to the anvil",
          "harbour": "in a small boat", "lighthouse": "on the round stairs", "market": "under an empty stall",
          "meadow": "among the clover", "mill": "close to the wheel", "orchard": "high up in a tree",
          "school": "on the last bench", "stable": "between two buckets", "tower": "at the top window",
          "vineyard": "behind the old press"}

# What one does with a thing.
THINGS = {"bell": "rang", "blanket": "spread", "cart": "pulled", "drum": "beat", "fiddle": "played", "flag": "waved",
          "hammer": "swung", "kettle": "filled", "kite": "flew", "ladder": "raised", "lantern": "lit", "rope": "threw",
          "shovel": "grabbed", "sledge": "pushed", "trumpet": "blew", "umbrella": "opened"}

# What the weather has done by the end of the day.
WEATHERS = {"windy": "the wind lay down to sleep", "rainy": "the rain had stopped", "foggy": "the fog had lifted",
            "warm": "the air grew cool", "snowy": "the snow lay deep and still", "stormy": "the storm had passed",
            "cloudy": "the clouds drifted apart", "frosty": "the frost drew flowers on the windows"}
