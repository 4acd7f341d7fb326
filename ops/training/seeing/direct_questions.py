"""Whole questions with alternatives."""

from __future__ import annotations

from ops.training.seeing.wordings import ABLE, HELLO, ONLY_PICTURES, WELCOME, WHO

# Whole questions of other forms.
DIRECT_QUESTIONS: dict[str, tuple[str, ...]] = {
    "plain colour": (
        "[What|Which] {color} [fills|covers|dominates|appears in|makes up] [this|the] "
        "[whole|entire|] {picture}?",
        "[What|Which] {color} [have we got here|would you call this|was used|do we have here|"
        "am I looking at|is everything|is all of it|can you make out]?",
        "How is [this|the] [whole|] {picture} [colored|coloured|painted]?",
        "[What|Which] {color} [was|has] [this|the] {picture} [painted|been painted|filled with]?",
        "This is all one {color}, [which|what is it|but which]?",
        "What {color} would a painter need?",
    ),
    "shape colour": (
        "[What|Which] {color} [fills|covers|was used for|was chosen for|appears on] [the|this] "
        "{thing}?",
        "[What|Which] {color} [was|has] [the|this] {thing} [painted|been given|been painted]?",
        "[What|Which] {color} [would you call|do you see on|can be seen on] [the|this] {thing}?",
        "How [is|was] [the|this] {thing} [coloured|painted|filled|tinted]?",
        "Look at [the|this] {thing}: [what|which] {color} is it?",
        "[The|This] {thing}, [what|which] {color} is it?",
    ),
    "background colour": (
        "[What|Which] {color} [lies|is seen|can be seen|appears|do you see] [behind|around|"
        "beneath|underneath|outside] [the|this] {thing}?",
        "[What|Which] {color} [does|did] [the|this] [background|backdrop|surrounding area|"
        "space around it|rest of the {picture}] have?",
        "[What|Which] {color} is [the|this] [backdrop|canvas|surrounding area|empty space|"
        "area behind the {thing}|part around the {thing}|field|space that is left]?",
        "How [is|was] the [background|backdrop|area around the {thing}] [colored|painted]?",
        "[Apart from|Besides|Except for|Leaving out|Ignoring] the {thing}, [what|which] {color} "
        "[is there|do you see|is the {picture}|remains|is left]?",
    ),
    "shape": (
        "[What|Which] [shape|figure|form|geometric shape|geometric figure|kind of figure|"
        "type of shape|sort of shape] [is depicted|is drawn here|is displayed|can be seen|"
        "appears|have we got|is present|do we have here|am I looking at|is visible|"
        "does this look like|do you recognize|can you make out]?",
        "[What|How] [would|do|might] [you|people|one] [call|name] [this|the] [shape|form|"
        "object|thing]?",
        "[What|Which] [shape|form|outline|contour] does [the|this] [object|thing|item|figure] "
        "[have|take|form|make]?",
        "What [type|kind|sort] of [figure|form|geometric shape|object|outline] is [this|it|that|"
        "shown|drawn|depicted|there]?",
        "[Is it|Is this|Do you see] a [circle|square|star|heart], a [triangle|cross], or what?",
        "[Circle|Star|Heart|Square], [square|cross], [triangle|heart] or something else?",
        "[Classify|Recognize|Categorize|Label] [the|this] [shape|figure|object|form|thing].",
        "In geometry, what is this [called|]?",
    ),
    "count": (
        "How many [different|single|individual|visible|] {things} [are visible|are present|"
        "are depicted|are displayed|are shown|exist|can be counted|can you find|do you count|"
        "are drawn|do we have|have you found|are to be seen|can one see] [here|"
        "in the {picture}|in this {picture}|]?",
        "[Count|Tally|Number|Add up] [all|all the|every one of the|the visible] {things} "
        "[here|in the {picture}|you see|that are shown|].",
        "[What|Which] [number|quantity] of {things} [is shown|is here|are there|can you find|"
        "does the {picture} contain|is depicted]?",
        "How [large|big|numerous] is the [group|set|collection] of {things}?",
        "One, two, three or more {things}?", "There are how many {things}?",
        "If you count the {things}, [how many|what] do you get?",
    ),
    "character": (
        "[What|Which] {sign} [is printed|is written|appears|is depicted|is displayed|was typed|"
        "can be read|is visible|can be seen|can you make out|have we got|am I looking at|"
        "do you recognize|do you read] [here|]?",
        "[Decipher|Transcribe|Recognize|Spell|Type|Repeat|Copy|Write down|Read aloud|Read out] "
        "[the|this] [{sign}|text|writing|symbol].",
        "What [has been|was] [printed|typed|written] [here|there|]?",
        "What [does|do] [it|this|the sign|the text|the writing] [read|spell]?",
        "Is this a letter or a digit, and which?", "[What|Which] {sign} would you read here?",
    ),
    "where": (
        "Where [exactly|] [is|was] [the|this] {thing} [located|placed|positioned|situated|put|"
        "drawn|found|to be found|shown|sitting|standing]?",
        "Where [does|did] [the|this] {thing} [sit|stand|appear|show up|rest]?",
        "[On|At|To|Near|Toward|By|Along] [what|which] [side|edge|border|end|part] "
        "[of the {picture}|] [is|was] [the|this] {thing} [located|placed|positioned|"
        "situated|found|drawn|shown]?",
        "[Which|What] [side|edge|border|end] [is|was] [the|this] {thing} [closest to|nearest to|"
        "close to|next to|at]?",
        "[Which|What] [side|edge|part|area] [holds|contains|has|shows] the {thing}?",
        "[Locate|Find|Spot|Place] [the|this] {thing}.", "Where should I look for the {thing}?",
    ),
    "same colour": (
        "Do [both|the two|these two|these|they|the {picture}s] [share|show|use|feature|display] "
        "[one|the same|an identical|a common|the very same|a matching] {color}?",
        "Are [both|the two|these two|they|the {picture}s|these] [identical|alike|equal|matching|"
        "the same] in {color}?",
        "Does the [first|second|one] {picture} [have|show] the [same|identical] {color} [as|like] "
        "the [second|other|first|next]?",
        "Are the [two|] {color}s [identical|the same|alike|a match]?",
        "[Identical|Equal|Matching|One] {color}?", "Is there only one {color} in both {picture}s?",
    ),
    "describe": (
        "What does [this|the] {picture} [contain|depict|display|portray|represent]?",
        "What [appears|is visible|is depicted|is shown|is displayed|do we have|have we got|"
        "is there] [here|in the {picture}|in this {picture}|]?",
        "[Summarize|Caption|Explain|Outline|Label|Portray] [this|the] {picture}.",
        "[Write|Give|Make|Compose|Provide] a [caption|description|label|title] [for it|].",
        "[In a few words|In short|Briefly|In one sentence|In brief|Roughly|In simple words], "
        "[what is it|what is this|what do you see|what does the {picture} show|describe it|"
        "describe the {picture}|what can be seen|tell me what it is|what has been drawn].",
        "[What is this|What do you see|Describe it|Describe this {picture}|Say what you see|"
        "What has been drawn|What does it show|What is in the {picture}] [in a few words|in short|"
        "briefly|in one sentence|in brief|roughly|in simple words].",
    ),
    "motion": (
        "[What|Which] [way|direction] [is|was] [the|this] {thing} [heading|moving|traveling|"
        "drifting|sliding|going|flying|shifting|headed|running]?",
        "Where [is|was] [the|this] {thing} [heading|headed|traveling|drifting|sliding|flying|"
        "running|shifting] [to|toward|]?",
        "[What|Which] [direction|way|path|course] does [the {thing}|it] [take|travel|follow|head]?",
        "[In|Into|To|Toward|Towards] [what|which] [direction|side] does [it|the {thing}] "
        "[drift|travel|head|slide|shift|run]?",
        "[Up, down, left or right|Left or right, up or down|Left, right, up, down], [which|"
        "where does it go|which way|how does it move]?",
        "How does [the {thing}|it] [move|travel] [across the {picture}|over the screen|]?",
    ),
    "change": (
        "[Does|Will] [the {thing}|it|this {thing}] [expand or contract|get larger or smaller|"
        "enlarge or reduce|increase or decrease in size|swell or dwindle|gain or lose size|"
        "become bigger or smaller|inflate or deflate|grow larger or smaller]?",
        "Is [the {thing}|it|this {thing}] [expanding or contracting|getting bigger or smaller|"
        "getting larger or smaller|enlarging or reducing|becoming larger or smaller|"
        "swelling or shrinking|increasing or decreasing|inflating or deflating]?",
        "Does the size [go up or down|increase or decrease|rise or fall]?",
        "How does [the {thing}|it] [change in size|change its size|develop]?",
        "[Growing or shrinking|Bigger or smaller|Larger or smaller|Expanding or contracting|"
        "Growth or shrinkage|Getting larger or getting smaller]?",
        "[Over time|As time passes|From start to end|During the {picture}], [does|will] "
        "[the {thing}|it] [grow or shrink|get bigger or smaller|become larger or smaller]?",
        "How did the {thing}'s size change?",
    ),
    "last colour": (
        "[What|Which] {color} [does|did] [the {thing}|it] [turn into|become|change to|end up|"
        "end up with|finish with|finish in|switch to|have eventually|have last|have finally|take]?",
        "[What|Which] {color} [is|was] [the {thing}|it] [finally|eventually|at the very end|"
        "by the end|at the finish|in the final frame|when the {picture} ends|when it is over|"
        "after the change|at last|on the last frame|at the close]?",
        "[In|At|By] the [end|finish|close|final frame|last moment], [what|which] {color} "
        "[is the {thing}|does the {thing} have|do you see|is it]?",
        "[After the change|When it stops|Once the {picture} is over|Finally|Lastly], [what|which] "
        "{color} is [the {thing}|it]?",
    ),
    "add": (
        "How many {things} do [both|the two|these two] {picture}s [contain|show|hold] "
        "[altogether|combined|in total]?",
        "[Combine|Sum|Total|Add up|Add together] [both|the two|all] [counts|numbers|{things}].",
        "[Altogether|In total|Combined|Taken together], how many {things} [are there|are shown]?",
    ),
    "lookup": (
        "[Who|Which person|What name] [is behind|goes with|is linked to|owns|matches|is listed "
        "under|is registered for|stands behind] [this|the] {sign}?",
        "[Look up|Search for|Find|Get|Fetch] the [person|name|owner] [behind|for|of] "
        "[this|the] {sign}.", "Who does [this|the] {sign} [belong to|stand for|refer to]?",
    ),
}  # fmt: skip

# Questions about several things, which are not all counts.
PLURAL_QUESTIONS: dict[str, tuple[str, ...]] = {
    "shape colour": (
        "[What|Which] {color} [are|do you see on|fills|is used for|have] [the|these|all|all the] "
        "{things}?",
        "[What|Which] {color} do [the|these|all the] {things} [have|show|share]?",
        "[What is|Name|Tell me|Give|Say|Identify] the {color} of [the|these|all|all the] {things}.",
        "The {things} [are|have] [what|which] {color}?", "How are the {things} colored?",
        "[Tell me|Say|I wonder] [what|which] {color} the {things} [are|have].",
        "In [what|which] {color} are the {things} [drawn|painted|filled]?",
    ),
    "background colour": (
        "[What|Which] {color} is [behind|around] [the|these|all] {things}?",
        "On [what|which] {color} are the {things}?",
        "[Name|Tell me|Give|Say] the {color} [behind|around] the {things}.",
    ),
}  # fmt: skip

# Messages without a picture, by their answers.
CHAT_PARAPHRASES: dict[str, tuple[str, ...]] = {
    HELLO: (
        "[Hi|Hey|Greetings|Good morning|Good afternoon|Good evening|Howdy|Hiya|Welcome] [there|"
        "model|again|friend|everyone|to you|].",
        "[Nice to meet you|How do you do|Is anybody there|Anyone home|What's up|Morning|Evening].",
    ),
    WHO: (
        "[Who|What] [am I talking to|am I speaking with|is this|is answering|do I speak to]?",
        "[What|Which] [kind of|sort of|type of|] [model|program|system|network|bot|machine] "
        "[are you|is this|do I talk to|am I using|is running here]?",
        "[What is|Tell me|Say|Give me|State|May I know] your [full|own|] name.",
        "[What|How] [are you called|should I call you|do people call you]?",
        "[Present|Describe|Identify] yourself.", "[Who|Which company] [made|built|trained] you?",
        "Are you [a human|a robot|a person|a bot|an AI|real|a machine|a language model]?",
    ),
    ABLE: (
        "What [tasks|things|questions|jobs] [can you do|do you support|can you handle|"
        "can you answer|are you able to answer|do you understand]?",
        "What [are your abilities|are your features|are you for|are you made for|is your purpose|"
        "is your job|is your task|do you offer|should I ask you|is it you do|else can you do]?",
        "How [can I use you|do I use this|may I use you|should I use this|does this work]?",
        "[What|Which] [pictures|images] [can you understand|can you read|do you know about]?",
        "[List|Name|Explain|Describe|Show me] your [abilities|features|functions|talents|uses].",
        "In [what|which] [way|ways] can you [help|assist|be of use|support me]?",
    ),
    WELCOME: (
        "[Thanks|Many thanks|Cheers|Thx|Perfect, thanks|Nice, thank you|"
        "Good, thanks] [for that|for your help|for the answer|a million|again|my friend|].",
        "[I am grateful|I appreciate it|That was helpful, thanks|Very kind of you|Much obliged].",
    ),
    ONLY_PICTURES: (
        "[Write|Compose|Make up|Invent] [a|some] [letter|essay|email|tale|program|code|rhyme|list]"
        " [for me|about spring|about my cat|].",
        "[What|Where|When|Who] [is|was] [the|] [biggest city|longest river|moon|first king|war|"
        "capital of Italy|best film|boss of the world|price of gold|speed of light|next train]?",
        "[Calculate|Compute|Solve] [two times three|seven minus one|ten plus five|the root of 9].",
        "How [far is the moon|tall is a giraffe|do I bake bread|much is a car|does a plane fly|"
        "many people live in Rome|old is the earth|do you feel|was your day]?",
        "Why [do birds sing|is grass green|do we sleep|is water wet|are you here|do people laugh]?",
        "[Translate|Say] [this|hello|good night|the sentence] [in|into] [French|German|Spanish].",
        "[Recommend|Suggest] [a book|a film|a restaurant|some music|a game|a present].",
        "[Do you like|Have you heard of|Can you play] [cats|chess|pizza|football|the sea|jazz]?",
    ),
}  # fmt: skip
