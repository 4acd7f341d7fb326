"""Noun phrases and indirect questions with alternatives, which frames make into sentences."""

from __future__ import annotations

# Things that have the answer: they follow "What is", "Name", and the like.
NOUN_PHRASES: dict[str, tuple[str, ...]] = {
    "plain colour": (
        "the [one|single|only|main|dominant|overall|basic|] {color} [of|in|throughout|used for|"
        "filling|covering] [the|this] [whole|entire|complete|full|] {picture}",
        "the {color} [that fills|that covers|you find in|shown in|seen in|of everything in] "
        "[the|this] {picture}",
        "this {picture}'s {color}", "the {color} [on display|being shown|of it all|of this one]",
        "the paint that [covers|fills] the {picture}", "the {color} name for this {picture}",
        "the correct word for this {color}", "the {color} in front of you",
    ),
    "shape colour": (
        "the [main|fill|actual|own|] {color} [of|given to|used for|used on|applied to|inside|"
        "filling|belonging to] [the|this|that] {thing}",
        "the {color} [in|with] which [the|this] {thing} [is|was|has been] "
        "[drawn|painted|filled|shown|made]",
        "the {color} [that|which] the {thing} [has|shows|wears|comes in|is painted in]",
        "[the|this] {thing}'s {color}", "the {color} on the {thing}", "the foreground {color}",
        "the paint of the {thing}", "the {color} that fills the {thing}",
    ),
    "background colour": (
        "the [main|plain|] {color} [of|in|used for|filling|making up] the [background|backdrop|"
        "surroundings|space behind the {thing}|area around the {thing}|empty space|rest]",
        "the [background's|backdrop's] {color}", "the [backdrop|canvas|surface|base] {color}",
        "the {color} [around|behind|surrounding|underneath|beneath|outside|next to] "
        "[the|this] {thing}",
        "the {color} [on|upon|against] which [the|this] {thing} [is|was|stands|sits|appears|lies|"
        "has been placed]",
        "the {color} of [everything|all] [but|apart from|other than|besides] the {thing}",
        "the {color} of the [field|wall|page|surface] behind the {thing}",
        "the {color} that [frames|surrounds|encloses|borders] the {thing}",
    ),
    "shape": (
        "the [type|kind|sort|name|category|class|] of [shape|figure|form|geometric shape|"
        "geometric figure|object|outline] [here|shown|in view|drawn|depicted|displayed|"
        "in this {picture}|in the {picture}|]",
        "the [geometric|basic|simple|drawn|depicted|displayed|visible|] [shape|figure|form|outline|"
        "contour|silhouette] [in|of|within|inside] [this|the] {picture}",
        "the [proper|right|correct|usual|geometric] [name|term|word] [for|of] [this|the] {thing}",
        "the [geometry|form|outline|silhouette|contour] of [this|the] [object|thing|item|drawing]",
        "the [shape|figure|form] [that|which] [appears|is visible|was drawn|you recognize] "
        "[here|]", "this {thing}'s [name|shape|form|type]",
    ),
    "count": (
        "the [total|exact|full|overall|correct|] [number|count|quantity|tally|amount] of "
        "[all|the|these|visible|separate|drawn|] {things} [here|shown|in the {picture}|"
        "in this {picture}|you see|present|visible|depicted|]",
        "the [size|number] of [this|the] [group|set|collection] of {things}",
        "the number you get [when|if] you count [the|all|all the] {things}",
        "the result of counting [the|all|these] {things}", "the tally", "the total",
        "the [quantity|number] [on display|present|here|shown]", "the {picture}'s {things} count",
    ),
    "character": (
        "the text [here|in the {picture}|in this {picture}|shown|written|]",
        "the [name|identity|value] of [this|the] {sign}", "the writing [here|in the {picture}|]",
        "the {sign} [that|which] [is|was|has been] [printed|written|typed|drawn|shown|displayed]"
        " [here|]", "the {sign} you can [read|make out|recognize|find] [here|]",
    ),
    "where": (
        "the [location|position|place|side|placement|spot|area] of [the|this] {thing} "
        "[in|within|inside|on] [the|this] {picture}",
        "the [side|edge|border|part|end|region|area|half] [where|at which|on which|in which] "
        "[the|this] {thing} [is|lies|sits|appears|is found|is located|was placed|can be seen]",
        "the [side|edge|border] [nearest|closest|next] to [the|this] {thing}",
        "the {thing}'s [location|position|place|whereabouts|side]",
        "the [side|edge|part] [that|which] [has|holds|contains|shows] the {thing}",
        "the [whereabouts|location|placement] of [the|this] {thing}",
    ),
    "same colour": (
        "your verdict: [same|equal|identical|matching] {color} [or not|yes or no]",
        "[yes or no|true or false], the [same|identical] {color} in [both|each|the two]",
    ),
    "describe": (
        "a [short|brief|simple|quick|one-line|concise|] [description|caption|summary|title|account]"
        " [of|for] [this|the] {picture}",
        "the [subject|content|contents|topic|motif] of [this|the] {picture}",
        "a [caption|description|summary|title|label]", "your [description|impression] of it",
        "[everything|all] [you see|shown|that is visible] [here|in the {picture}]",
    ),
    "motion": (
        "the [direction|course|path|heading|way] of [the|this] [{thing}|moving {thing}|"
        "{thing}'s movement|{thing}'s motion|movement|motion|travel]",
        "the [direction|way|course|side|heading] [in which|along which|toward which|to which] "
        "[the|this] {thing} [moves|goes|travels|heads|drifts|slides|shifts|runs|wanders|floats]",
        "the [direction|heading] [the {thing} takes|it takes|it is moving in|it follows]",
        "the [movement|motion] direction", "the {thing}'s [direction|heading|course|path|motion]",
        "the side [it|the {thing}] [moves|heads|travels] [to|toward|towards]",
    ),
    "change": (
        "the [change|trend|development] [of|in] [the|this] {thing}'s [size|scale|dimensions]",
        "the [size|scale] [change|trend] [of the {thing}|in this {picture}|over time|]",
        "the way [the size changes|the {thing}'s size changes|its size changes|it changes in size]",
        "what [happens to|becomes of] the [size|scale|dimensions] of the {thing}",
        "the development of its [size|dimensions|scale]",
    ),
    "last colour": (
        "the [final|last|ending|closing|resulting|eventual|ultimate|new] {color} "
        "[of the {thing}|the {thing} has|it has|it takes|it gets|that you see|]",
        "the {color} [of the {thing}|it has|the {thing} has] [in|on] the "
        "[final|last|closing|very last] [frame|picture|image|moment|shot|second]",
        "the {color} [of the {thing}|it has|the {thing} has] [when|once|as|after] "
        "[the {picture}|it|everything] [ends|stops|finishes|is over]",
        "the {color} [it|the {thing}] [turns to|turns into|changes to|ends up with|becomes|"
        "switches to|finishes in]",
        "the {thing}'s [final|last|ending|closing] {color}",
    ),
    "add": (
        "the [combined|joint|overall|grand|total|summed] [number|count|total|amount|quantity] of "
        "{things} [in|across|over] [both|the two|both of the|these two] {picture}s",
        "the [sum|total] [of|over] [both|the two] [counts|numbers|amounts|pictures|groups]",
        "the number of {things} [altogether|overall|combined|in total]",
    ),
    "lookup": (
        "the [name|person|owner|holder] [for|of|behind|linked to|tied to|registered for|"
        "listed under|stored for|assigned to] [this|the] {sign}",
        "the [person|one|owner|somebody] who [has|owns|uses|holds] [this|the] {sign}",
        "the entry for [this|the] {sign}", "this {sign}'s [name|owner|person]",
    ),
}  # fmt: skip

# Indirect questions: they follow "Tell me", "Do you know", and the like.
INDIRECT_QUESTIONS: dict[str, tuple[str, ...]] = {
    "plain colour": (
        "[what|which] {color} [fills|covers|dominates|is used in|makes up|is found in|appears in] "
        "[the|this] [whole|entire|] {picture}",
        "[what|which] {color} [the|this] [whole|entire|] {picture} [is|was painted|is filled with|"
        "consists of|is made of|shows|comes in]",
        "how [the|this] {picture} is [colored|coloured|painted|tinted]",
        "[what|which] {color} [we have here|I am looking at|everything is|it all is]",
    ),
    "shape colour": (
        "[what|which] {color} [fills|covers|is used for|was used for|was chosen for|belongs to|"
        "is seen on|makes up] [the|this] {thing}",
        "[what|which] {color} [the|this] {thing} [comes in|was given|was painted|is filled with|"
        "appears in|is painted|wears|shows|has been given|turns out to be]",
        "how [the|this] {thing} is [colored|coloured|painted|tinted|filled]",
        "with [what|which] {color} the {thing} [is|was] [filled|painted|drawn]",
    ),
    "background colour": (
        "[what|which] {color} [is|lies|can be seen|appears|shows] [behind|around|beneath|"
        "underneath|outside|in back of] [the|this] {thing}",
        "[what|which] {color} [the|this] [background|backdrop|area around it|rest of the {picture}|"
        "surrounding area|empty space] [is|has|was painted|was given|comes in|shows]",
        "how the [background|backdrop|rest of the {picture}] is [colored|coloured|painted]",
        "[what|which] {color} [surrounds|frames|borders|encloses] [the|this] {thing}",
    ),
    "shape": (
        "[what|which] [shape|figure|form|geometric shape|kind of shape|type of shape|sort of "
        "figure|geometric figure] [we have here|is drawn|appears here|is depicted|is displayed|"
        "is visible|can be seen|is present|you recognize|the {picture} contains|the artist drew|"
        "I am looking at|we are dealing with]",
        "how [this|the] [shape|figure|form|geometric object] is [called|named|known]",
        "[what|which] [shape|form|outline] [the|this] [object|thing|item|figure] [has|takes|is|"
        "forms|makes]",
    ),
    "count": (
        "how many [different|single|individual|visible|] {things} [are visible|are present|"
        "are depicted|are displayed|are shown|exist|can be counted|you can find|you count|"
        "the {picture} contains|have been placed here|are to be found|it has]",
        "how many [of these|] {things} [there are|are there] [altogether|overall|in all|]",
        "[what|which] [number|quantity|amount] of {things} [is shown|you find|is present|"
        "there is|the {picture} has]",
        "how [large|big|numerous] the [group|set|collection] of {things} is",
    ),
    "character": (
        "[what|which] {sign} [is printed|is written|appears|is depicted|is displayed|was typed|"
        "can be read|is visible|can be seen|you recognize|you can make out|the {picture} contains|"
        "I am looking at|we have] [here|]",
        "how [this|the] {sign} [reads|is called|is read]", "what [it reads|stands here|it spells]",
        "what the [{picture}|text|writing] [says|reads|spells]",
        "what [has been|was] [written|printed|typed] [here|there|]",
    ),
    "where": (
        "where [exactly|] [the|this] {thing} [lies|sits|stands|appears|is found|is located|"
        "is placed|is positioned|is situated|was put|was drawn|can be seen|has been placed]",
        "[on|at|to|near|toward|by|along] [what|which] [side|edge|border|end|part] [the|this] "
        "{thing} [lies|sits|stands|appears|is found|is located|is placed|is positioned|was drawn]",
        "[which|what] [side|edge|border|part|end|area] [of the {picture}|] [the|this] {thing} "
        "[is near|is close to|is closest to|touches|lies at|occupies|is next to]",
        "where to [look for|spot|discover] the {thing}",
    ),
    "same colour": (
        "[if|whether] [both|the two|these two|these|they|the {picture}s|both {picture}s] "
        "[share|show|use|have|display|feature] [one|the same|an identical|a common|an equal|"
        "the very same|a matching] {color}",
        "[if|whether] [both|the two|these two|they|the {picture}s] are [identical|equal|alike|"
        "the same|matching] in {color}",
        "[if|whether] the [first|second|one] {picture} [has|shows] the [same|identical|very same] "
        "{color} [as|like] the other",
        "[if|whether] the [two|] {color}s [are identical|are the same|coincide|fit|are alike]",
    ),
    "describe": (
        "what [this|the] {picture} [contains|depicts|displays|portrays|represents|is about|is of]",
        "what [appears|is visible|is depicted|is shown|is displayed|is going on|exists] "
        "[here|in the {picture}|in this {picture}|]",
        "what [we have here|I am looking at|you find]",
        "what [you|one|we] can [make out|recognize|find] [here|in it|]",
    ),
    "motion": (
        "[what|which] [way|direction] [the {thing}|this {thing}|it] [heads|travels|drifts|slides|"
        "shifts|is heading|is traveling|is drifting|is sliding|flies|runs|is shifting|wanders|"
        "floats]",
        "where [the|this] {thing} [heads|travels|drifts|slides|is headed|is heading|flies|runs|"
        "ends up going|moves to|moves toward]",
        "how the {thing} [moves|travels|is moving] [across the {picture}|over the screen|]",
        "[in|to|toward|towards] [what|which] [direction|side] [it|the {thing}] [travels|heads|"
        "drifts|slides|flies|shifts|is moved|is moving]",
    ),
    "change": (
        "[if|whether] [the|this] {thing} [expands or contracts|gets larger or smaller|"
        "enlarges or reduces|increases or decreases in size|swells or dwindles|"
        "gains or loses size|becomes bigger or smaller|is growing or is shrinking|"
        "is getting bigger or smaller|inflates or deflates|is made larger or smaller]",
        "[if|whether] the size [goes up or down|increases or decreases|rises or falls]",
        "how the {thing} [changes in size|develops in size|changes its size|is scaled]",
        "[if|whether] it [expands or contracts|grows or it shrinks|swells or shrinks]",
    ),
    "last colour": (
        "[what|which] {color} [the {thing}|it] [has|is|shows|gets] [eventually|finally|last|"
        "in the end|by the end|at the finish|at the very end|in the final frame|"
        "when the {picture} ends|when it is over|after the change|once it has changed]",
        "[what|which] {color} [the {thing}|it] [turns into|turns|becomes|changes to|ends up|"
        "ends up with|finishes with|finishes in|switches to|is left with]",
        "[what|which] {color} [comes|is shown|is seen|appears] [last|at the end|finally]",
        "how the {thing} is colored [at last|in the final moment|when the {picture} stops]",
    ),
    "add": (
        "how many {things} [both|the two|these two] {picture}s [contain|show|hold|have] "
        "[altogether|combined|in total|taken together]",
        "how many {things} [you get|there are|that makes] [altogether|in all|in total|overall|"
        "if you take both {picture}s together|when both are added]",
        "what [both counts|the two numbers|the two amounts] [make|give|sum to|total]",
    ),
    "lookup": (
        "[who|which person|which name] [is behind|goes with|is linked to|owns|is listed under|"
        "is registered for|stands for|matches] [this|the] {sign}",
        "[what|which] name [is stored for|fits|is linked to|is tied to] [this|the] {sign}",
        "who [this|the] {sign} [belongs to|stands for|refers to|is for]",
    ),
}  # fmt: skip
