"""Parts of questions, which make sentences of many forms."""

from __future__ import annotations

from ops.training.seeing.wordings import ABLE, HELLO, ONLY_PICTURES, WELCOME, WHO

# Noun phrases and indirect questions, which FRAMES make into sentences of many forms.
CLAUSES: dict[str, tuple[str, ...]] = {
    "plain colour": (
        "what {color} this {picture} is", "which {color} this is",
        "the {color} of this {picture}", "which {color} the {picture} has",
        "the {color} that you see", "what {color} fills it", "which {color} you can see here",
        "the {color} in the {picture}", "its {color}",
    ),
    "shape colour": (
        "what {color} the {thing} is", "which {color} the {thing} has",
        "the {color} of the {thing}", "in which {color} the {thing} was drawn",
        "the {thing}'s {color}", "how the {thing} is colored",
        "what {color} was used for the {thing}", "which {color} this {thing} is",
    ),
    "background colour": (
        "what {color} the background is", "the {color} of the background",
        "the background {color}", "which {color} lies behind the {thing}",
        "the {color} around the {thing}", "what {color} surrounds the {thing}",
        "on what {color} the {thing} is", "which {color} the {thing} stands on",
        "the {color} at the back", "the {color} of the area behind the {thing}",
        "the {color} of the surroundings", "the {color} of the rest of the {picture}",
        "what {color} the rest is", "the {color} that is not the {thing}'s",
    ),
    "shape": (
        "which shape this is", "what shape you see", "the shape in the {picture}",
        "the name of the shape", "which figure is in the {picture}", "what form the object has",
        "what the shape is called", "which shape was drawn here",
        "the kind of shape that is shown", "which geometric shape is here", "the shape",
    ),
    "count": (
        "how many {things} there are", "how many {things} you see", "the number of {things}",
        "how many {things} are in the {picture}", "the count of {things}",
        "how many {things} were drawn", "the total number of {things}",
        "how many of them there are", "how many {things} the {picture} has",
        "how often you see something", "the amount of {things}",
    ),
    "character": (
        "which {sign} this is", "what {sign} you see", "the {sign} in the {picture}",
        "what is written", "which {sign} is shown", "the {sign}",
        "what {sign} the {picture} shows", "what it says", "which {sign} is written here",
        "the name of the {sign}",
    ),
    "where": (
        "where the {thing} is", "on which side the {thing} is", "the position of the {thing}",
        "at which edge the {thing} is", "the side of the {thing}",
        "which side the {thing} is on", "where the {thing} is in the {picture}",
        "the place of the {thing}", "whereabouts the {thing} sits",
        "which part of the {picture} has the {thing}", "where to find the {thing}",
    ),
    "same colour": (
        "if they have the same {color}", "whether the {color}s are equal",
        "whether both {picture}s have one {color}", "if the two {picture}s are alike in {color}",
        "if the {color} is the same in both", "whether they match in {color}",
        "if both are the same {color}", "whether the {color}s of the two {picture}s agree",
    ),
    "describe": (
        "what you see", "what is in the {picture}", "what the {picture} shows", "what this is",
        "what was drawn here", "what can be seen here", "the content of the {picture}",
    ),
    "motion": (
        "which way the {thing} moves", "where the {thing} goes", "in which direction it moves",
        "the direction of the {thing}", "which way it is going",
        "the direction in which the {thing} moves", "where the {thing} is moving",
        "to which side the {thing} travels",
    ),
    "change": (
        "if the {thing} grows or shrinks", "whether it grows or shrinks",
        "whether the {thing} becomes larger or smaller", "how the size of the {thing} changes",
        "if it gets bigger or smaller", "what happens to the size of the {thing}",
        "how its size changes",
    ),
    "last colour": (
        "what {color} the {thing} is at the end", "the {color} at the end",
        "the last {color} of the {thing}", "which {color} the {thing} has in the last frame",
        "the final {color}", "what {color} it ends with", "which {color} it has in the end",
    ),
    "add": (
        "the sum of both", "how many {things} there are in both {picture}s together",
        "the total of the two {picture}s", "how many {things} both {picture}s have in all",
        "the sum of the {things} in the two {picture}s", "what the two counts add up to",
        "the number of {things} in both together",
        "how many it makes when you add the {things} of both",
    ),
    "lookup": (
        "whose {sign} this is", "the name for this {sign}", "which name belongs to this {sign}",
        "the name behind the {sign}", "what name the {sign} stands for", "who has this {sign}",
        "the person with this {sign}", "to whom the {sign} belongs",
        "the name that goes with it",
    ),
}  # fmt: skip

FRAMES = (
    "Tell me {}.", "Can you tell me {}?", "Could you say {}?", "Please tell me {}.", "Say {}.",
    "I would like to know {}.", "I want to know {}.", "Do you know {}?", "Please name {}.",
    "Look at it and say {}.", "Can you see {}?", "Let me know {}.", "I need to know {}, please.",
    "Would you tell me {}?", "Find out {}.", "Give me {}.", "Write down {}.", "I wonder {}.",
    "My question is {}.", "Now say {}.", "{}?", "{}, please.", "Answer me this: {}?", "Explain {}.",
    "State {}.", "Show me that you know {}.", "Report {}.", "From what you see, {}?",
)  # fmt: skip
FRAMED_SHARE = 0.5
# Sentences that change nothing.
OPENINGS = (
    "Look at this {picture}.", "Here is a {picture}.", "I have a {picture} for you.",
    "Look closely.", "This is for a test.", "I drew this.", "See the {picture}.",
    "Take a look at the {picture}.", "I made this for you.", "One more.",
    "My friend sent me this {picture}.",
)  # fmt: skip
CLOSINGS = ("Thanks!", "Thank you.", "I cannot see it.", "It is important.", "Take your time.")

# Words that change nothing, wherever they stand.
FILLERS = (
    "now", "then", "here", "actually", "just", "maybe", "exactly", "really", "again", "well,", "so",
    "okay,", "hm,", "simply", "quickly", "today", "of course", "by the way", "dear", "in your view",
)  # fmt: skip

CHAT_CLAUSES: dict[str, tuple[str, ...]] = {
    WHO: (
        "who you are", "what you are", "your name", "which model you are", "what you are called",
        "something about yourself", "who is there", "what kind of model you are", "who made you",
    ),
    ABLE: (
        "what you can do", "what you are able to do", "how you can help", "what you know",
        "what you are good at", "which questions you answer", "your skills", "what I can ask you",
        "what you are made for", "how to use you",
    ),
    ONLY_PICTURES: (
        "a joke", "a song", "a poem", "the weather", "what time it is", "the capital of Spain",
        "what two plus two is", "a story about a dog", "the news", "how to cook rice",
        "who won the game", "the meaning of life", "what day it is",
        "the answer to everything", "a secret",
    ),
    WELCOME: ("thanks", "thank you", "many thanks", "thanks a lot", "thank you very much"),
    HELLO: ("hello", "hi", "hey", "good morning", "good evening", "hello there", "hi there"),
}  # fmt: skip
CHAT_FRAMES = (
    "{}", "{}!", "{}?", "{}, please.", "Tell me {}.", "Please tell me {}.", "Can you tell me {}?",
    "I want to know {}.", "Say {}.", "Do you know {}?", "Well, {}.", "And {}?", "{}, my dear.",
    "Let us hear {}.", "First of all, {}.", "Dear model, {}.", "Could you say {}?", "Again: {}.",
)  # fmt: skip
