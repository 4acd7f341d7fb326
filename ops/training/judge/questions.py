"""Questions of the judge: forms that the training asks too, and forms that it never asks.

A test holds that no question of UNSEEN can come up in the training.
"""

from __future__ import annotations

SEEN: dict[str, tuple[str, ...]] = {
    "plain": (
        "What color is this image?", "Which colour is this?", "Name the color of the picture.",
    ),
    "colour": (
        "What color is the shape?", "Which colour is the object?",
        "What's the color of the figure in the image?",
    ),
    "background": (
        "What color is the background?", "What is the background colour?",
    ),
    "shape": (
        "What shape is this?", "What shape is in the picture?", "Name the shape.",
        "What kind of shape is this?",
    ),
    "count": (
        "How many shapes are there?", "How many objects do you see?", "Count the shapes.",
        "How many figures are in this image?",
    ),
    "character": (
        "Which character is this?", "What letter or digit is shown?", "Read the sign.",
        "What is written here?",
    ),
    "where": (
        "Where is the shape?", "On which side is the object?",
        "Where in the picture is the figure?",
    ),
    "same": (
        "Are they the same color?", "Do both images have the same colour?", "Same color?",
    ),
    "describe": (
        "Describe the picture.", "What do you see?",
    ),
    "chat": (
        "Who are you?", "What can you do?", "Hello!", "Thanks", "What is the capital of France?",
    ),
    "nothing": (
        "What color is this image?", "How many shapes are there?", "Where is the shape?",
    ),
    "motion": (
        "Which way does the shape move?", "In which direction does the object move?",
        "Where does the shape go?",
    ),
    "change": (
        "Does the shape grow or shrink?", "Does it become larger or smaller?",
    ),
    "last": (
        "What color is the shape at the end?", "Which colour does the object have at the end?",
    ),
    "add": (
        "How many shapes are there in both images together?",
        "What is the total number of shapes in the two pictures?",
    ),
    "lookup": (
        "Whose letter is this?", "Which name belongs to this sign?",
        "Look up the name of this character.",
    ),
}  # fmt: skip

UNSEEN: dict[str, tuple[str, ...]] = {
    "plain": (
        "If you had to pick one word for the colour here, which would it be?",
        "I painted a wall, guess the color?", "Which hue fills the whole frame?",
        "Name that colour!", "Color of the photo?",
    ),
    "colour": (
        "The shape has been painted in which color?", "Pick the colour that the object is.",
        "What color did I give the shape?", "Shape color?",
        "Apart from the background, which colour is there?",
    ),
    "background": (
        "What is the colour of everything except the shape?", "And the background, what color?",
        "Which colour did I fill the backdrop with?", "What color has the canvas behind it?",
        "The background has which colour?",
    ),
    "shape": (
        "Guess the shape!", "Which of the shapes did I draw?",
        "Say what geometric figure it is.", "I drew something, is it a star or something else?",
        "What would you call this figure?",
    ),
    "count": (
        "Please count: how many things?", "Number of objects?",
        "How many separate shapes appear?", "Could you count the figures for me?",
        "I drew some shapes, how many did I draw?",
    ),
    "character": (
        "Which key would I press to type this?", "Spell out the single character in this image.",
        "What sign has been printed here?", "Is this a letter or a digit, and which one?",
        "Guess the letter or digit.",
    ),
    "where": (
        "Which border is closest to the shape?", "Seen from the middle, where is the object?",
        "Where did I put the shape: left, right, top or bottom?", "Location of the object?",
        "The shape is near which side?",
    ),
    "same": (
        "Compare the two pictures: same color or not?",
        "Would you say both have an equal colour?", "Two images, one color?",
        "Is there no difference in colour between them?",
    ),
    "describe": (
        "In a few words, what have I drawn?", "How would you describe this drawing?",
    ),
    "chat": (
        "Tell me who you are, please.", "So what are you able to do for me?", "Hello my friend!",
        "Thank you so much!", "Can you sing a song?",
    ),
    "nothing": (
        "Please count: how many things?", "Guess the shape!", "The shape is near which side?",
    ),
    "motion": (
        "Towards which side is it heading?", "Where is the object moving to?",
        "Describe the movement: left, right, up or down?", "It travels in what direction?",
    ),
    "change": (
        "Over time, does it grow or does it shrink?", "Is it bigger or smaller at the end?",
        "Tell me what its size does.",
    ),
    "last": (
        "When the clip is over, what color is it?", "Which colour do we see last on the shape?",
        "It ends up in which color?",
    ),
    "add": (
        "Taken together, how many shapes do the two images show?",
        "Count both pictures and give the sum.", "How many objects in total, over both?",
    ),
    "lookup": (
        "Can you find out who goes by this letter?", "Which person does this sign mean?",
        "Get me the name for this character.",
    ),
}  # fmt: skip

# Answers to the questions of "chat", by their places in the two tables.
CHAT_ANSWERS = (
    "I am the Pagemill demo model, a very small model that looks at simple pictures.",
    "I can name colors, shapes, letters and digits, count shapes and say where they are.",
    "Hello! Show me a picture and ask me about it.",
    "You are welcome.",
    "I only know about simple pictures.",
)
NOTHING_SHOWN = "I see no picture."

# Names, arguments and descriptions of tools: some that the training has too, and some new ones.
ADD_TOOLS = (
    ("add", ("a", "b"), "Adds two numbers."), ("sum", ("x", "y"), "The sum of two numbers."),
    ("add_integers", ("a", "b"), "Add two integers."), ("plus", ("first", "second"), ""),
    ("make_sum", ("left", "right"), "Adds two counts and returns the sum."),
)  # fmt: skip
LOOKUP_TOOLS = (
    ("lookup", ("letter",), "The name behind a letter."), ("find_name", ("sign",), "Finds a name."),
    ("whose", ("letter",), "Tells whose letter it is."), ("get_name", ("character",), ""),
    ("name_book", ("key",), "A book of names by letter."),
)  # fmt: skip
PEOPLE = (
    "Martha", "Nils", "Omar", "Petra", "Robin", "Sofia", "Theo", "Ursula", "Wanda", "Arthur",
    "Bella", "Chris", "Dora", "Edgar", "Fiona", "Gustav", "Helen", "Igor", "Julia", "Kim",
)  # fmt: skip
