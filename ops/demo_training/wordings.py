"""Tables of questions, answers and phrases of the training conversations."""

from __future__ import annotations

WORDINGS: dict[str, tuple[str, ...]] = {
    "plain colour": (
        "What {color} is this {picture}?",
        "What {color} is the {picture}?",
        "What is the {color} of this {picture}?",
        "What's the {color} of the {picture}?",
        "Which {color} is this?",
        "What {color} is this?",
        "What {color} is it?",
        "What {color} do you see?",
        "Name the {color} of the {picture}.",
        "Tell me the {color} of this {picture}.",
        "Which {color} does this {picture} show?",
        "Which {color} is the {picture}?",
        "{color}?",
    ),
    "shape colour": (
        "What {color} is the {thing}?",
        "What {color} is this {thing}?",
        "Which {color} is the {thing}?",
        "What is the {color} of the {thing}?",
        "What's the {color} of the {thing} in the {picture}?",
        "What {color} is the {thing} in this {picture}?",
        "Tell me the {color} of the {thing}.",
        "Name the {color} of the {thing}.",
        "What {color} does the {thing} have?",
        "The {thing} has which {color}?",
    ),
    "background colour": (
        "What {color} is the background?",
        "Which {color} is the background?",
        "What is the background {color}?",
        "What is the {color} of the background?",
        "Name the {color} of the background.",
        "What {color} is behind the {thing}?",
        "Tell me the background {color}.",
    ),
    "shape": (
        "What shape is this?",
        "Which shape is this?",
        "What shape is it?",
        "What shape is in the {picture}?",
        "What shape do you see?",
        "Which shape does the {picture} show?",
        "What kind of shape is this?",
        "What is the shape in this {picture}?",
        "Name the shape.",
        "Name the shape in this {picture}.",
        "What is the name of this shape?",
        "Tell me which shape this is.",
        "Shape?",
    ),
    "count": (
        "How many {things} are there?",
        "How many {things} do you see?",
        "How many {things} are in this {picture}?",
        "How many {things} does the {picture} show?",
        "How many {things} can you see in the {picture}?",
        "Count the {things}.",
        "Count the {things} in this {picture}.",
        "What is the number of {things}?",
        "Tell me the number of {things} in the {picture}.",
        "How many?",
    ),
    "character": (
        "Which {sign} is this?",
        "What {sign} is this?",
        "What {sign} is shown?",
        "Which {sign} do you see?",
        "What {sign} do you see in the {picture}?",
        "Which {sign} is in this {picture}?",
        "Read the {sign}.",
        "Read the {sign} in the {picture}.",
        "What is written here?",
        "What does the {picture} say?",
        "What is written in this {picture}?",
        "Name the {sign}.",
    ),
    "where": (
        "Where is the {thing}?",
        "Where is the {thing} in this {picture}?",
        "Where do you see the {thing}?",
        "Where in the {picture} is the {thing}?",
        "On which side is the {thing}?",
        "Which side is the {thing} on?",
        "At which side of the {picture} is the {thing}?",
        "Is the {thing} left, right, top or bottom?",
        "Tell me where the {thing} is.",
        "What is the position of the {thing}?",
    ),
    "same colour": (
        "Are they the same {color}?",
        "Are these the same {color}?",
        "Do they have the same {color}?",
        "Are the two {picture}s the same {color}?",
        "Do both {picture}s have the same {color}?",
        "Do these {picture}s show the same {color}?",
        "Is the {color} the same in both {picture}s?",
        "Same {color}?",
        "Have the two {picture}s one {color}?",
    ),
    "describe": (
        "What do you see?",
        "What is in this {picture}?",
        "What is this?",
        "What does this {picture} show?",
        "Describe the {picture}.",
        "Describe this {picture}.",
        "Describe what you see.",
        "What can you see in the {picture}?",
        "Tell me what is in the {picture}.",
    ),
}

# Never trained on: they show how far the model depends on the exact words.
UNSEEN_WORDINGS: dict[str, tuple[str, ...]] = {
    "plain colour": ("Can you tell which {color} this {picture} is?", "Say the {color} you see."),
    "shape colour": ("In which {color} is the {thing} drawn?", "Say which {color} the {thing} is."),
    "shape": ("Can you say which shape you see here?", "The {picture} shows which shape?"),
    "count": ("Say how many {things} you see here.", "What number of {things} do you see?"),
    "character": ("Can you read this {sign}?", "Tell me the {sign} you see here."),
    "where": ("Can you say where the {thing} is?", "Where is the {thing} here?"),
    "same colour": ("Can you say if they have one {color}?", "Is it the same {color} in both?"),
}

HELLO = "Hello! Show me a picture and ask me about it."
WHO = "I am the Pagemill demo model, a very small model that looks at simple pictures."
ABLE = "I can name colors, shapes, letters and digits, count shapes and say where they are."
WELCOME = "You are welcome."
ONLY_PICTURES = "I only know about simple pictures."
NO_PICTURE = "I see no picture."

CHAT: dict[str, tuple[str, ...]] = {
    HELLO: (
        "Hello", "Hello!", "Hi", "Hi!", "Hey", "Hi there!", "Hello there", "Good morning!",
        "Good evening", "Good day", "Greetings",
    ),
    WHO: (
        "Who are you?", "What are you?", "What is your name?", "What's your name?",
        "Introduce yourself.", "Tell me about yourself.", "Which model are you?",
        "What model is this?", "Hello, who are you?", "Hi, who are you?", "Are you an assistant?",
    ),
    ABLE: (
        "What can you do?", "What can you do for me?", "How can you help me?", "Help",
        "What do you know?", "What are you able to do?", "What are you good at?",
        "What can I ask you?", "Which questions can you answer?", "What are your skills?",
        "Hello, what can you do?", "Tell me what you can do.", "How do you work?",
    ),
    WELCOME: ("Thanks", "Thank you!", "Thanks a lot!", "Thank you very much.", "Great, thanks."),
    ONLY_PICTURES: (
        "What is the capital of France?", "Write a poem.", "Tell me a joke.", "Tell me a story.",
        "What is two plus two?", "What is the weather today?", "Who is the president?",
        "How old are you?", "Translate this text.", "Write some code for me.", "What time is it?",
        "What is love?", "Explain gravity.", "Why is the sky blue?", "Do you like music?",
    ),
}  # fmt: skip

SUFFIXES = (
    "Answer in one word.", "Answer with one word.", "One word only.", "In one word.",
    "Please answer in one word.", "Answer briefly.", "Be brief.", "Just the answer.",
)  # fmt: skip
PREFIXES = ("Please tell me:", "Question:", "Hi!", "Hello!", "Now,", "Please look:", "Hey,")
SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are a helpful assistant. Answer briefly.", "Be brief.",
    "Answer in one word.", "You answer questions about pictures.",
)  # fmt: skip

# Which questions a picture can be asked; the first is the one that it was drawn for.
ASKABLE: dict[str, tuple[str, ...]] = {
    "plain": ("plain colour", "describe"),
    "shape": ("shape", "shape colour", "background colour", "count", "describe"),
    "count": ("count", "shape colour", "describe"),
    "where": ("where", "shape", "shape colour", "count"),
    "character": ("character", "shape colour", "describe"),
}
