package org.ondevice.core

/** One class: the answer text that stands for it, and the labels in data files that mean it. */
class Choice(val answer: String, vararg val labels: String)

/** A row in words: a (prompt, answer) pair for each candidate, the index of the right one, or accepted answers. */
internal class Rendered(
    val pairs: List<Pair<String, String>>,
    val gold: Int? = null,
    val answers: List<String> = emptyList(),
    val label: String? = null,
)

/**
 * A prompt of P-RGE's Table 7 with MeZO's verbalisers, as `ondevice/data/tasks/templates.py` has it.
 *
 * @property columns the names that each placeholder of [prompt] has in data files; dots step into objects.
 * @property prompt with placeholders in braces; replaced by [pairs] where candidates are not simply appended.
 */
class Task internal constructor(
    val name: String,
    val kind: Format,
    val columns: Map<String, List<String>>,
    val choices: List<Choice>,
    val prompt: String,
    internal val labels: List<String> = listOf("label"),
    private val clean: (Map<String, String>) -> Map<String, String> = { it },
    private val pairs: ((Map<String, String>) -> List<Pair<String, String>>)? = null,
    private val own: ((Task, Map<*, *>) -> Rendered)? = null,
    /** A label for a text whose own is not known; empty if answers are free. */
    internal val placeholder: String = choices.firstOrNull()?.labels?.first() ?: "",
    /** The placeholder whose column holds the row's candidates as a list. */
    internal val list: String? = null,
    /** Columns that are read besides [columns] and [labels]. */
    internal val reads: List<String> = emptyList(),
) {
    /** True for a template of one's own. */
    internal val isOwn get() = own != null

    internal fun render(fields: Map<*, *>): Rendered {
        if (own != null) return own.invoke(this, fields)
        val values = clean(columns.mapValues { (_, keys) -> Texts.strip(Texts.check(column(fields, keys), keys[0])) })
        if (kind == Format.QA) {
            val answers = answersOf(column(fields, labels), labels[0])
            return Rendered(listOf(fill(values) to " ${answers[0]}\n"), answers = answers)
        }
        val made = pairs?.invoke(values) ?: fill(values).let { text -> choices.map { text to it.answer } }
        val gold = gold(column(fields, labels))
        val shown = Texts.strip(choices[gold].answer).ifEmpty { choices[gold].labels.last() }
        return Rendered(made, gold, label = shown)
    }

    private fun fill(values: Map<String, String>): String =
        Regex("\\{(\\w+)\\}").replace(prompt) { match -> values.getValue(match.groupValues[1]) }

    private fun gold(value: Any?): Int {
        val key = RowConverter.labelKey(value)
        val index = choices.indexOfFirst { key in it.labels }
        if (index >= 0) return index
        val allowed = choices.withIndex().joinToString(", ") { (place, choice) ->
            "${choice.labels.joinToString(" or ")} (${Texts.strip(choice.answer).ifEmpty { "${place + 1}" }})"
        }
        throw BadRow(labels[0], "expected a label of $name: $allowed; received ${describe(value)}")
    }

    internal companion object {
        /** The value of the first of [keys] that the record has; dots step into objects. */
        fun column(fields: Map<*, *>, keys: List<String>): Any {
            for (key in keys) {
                var value: Any? = fields
                for (part in if (fields.containsKey(key)) listOf(key) else key.split('.')) value = (value as? Map<*, *>)?.get(part)
                if (value != null) return value
            }
            val others = if (keys.size > 1) "; expected one of the keys ${keys.joinToString(", ")}" else ""
            throw BadRow(keys[0], "is missing$others")
        }

        /** Answers: SQuAD's [{"text": ...}], Hugging Face's {"text": [...]}, a list, or a text. */
        fun answersOf(value: Any?, field: String): List<String> {
            val inner = if (value is Map<*, *>) value["text"] else value
            val texts = (inner as? List<*> ?: listOf(inner)).map { if (it is Map<*, *>) it["text"] else it }
            if (texts.isEmpty()) throw BadRow(field, "has no answer")
            return texts.map { Texts.strip(Texts.check(it, field)) }.distinct()
        }
    }
}

/** The tasks by name. */
object Tasks {
    private val YES = arrayOf("true", "1")
    private val NO = arrayOf("false", "0")
    private val NO_YES = listOf(Choice("No", *NO), Choice("Yes", *YES))
    private val ENTAILS = listOf(Choice("Yes", "entailment"), Choice("No", "not_entailment"))
    private val SAME = listOf(Choice("No", "0", "not_equivalent", "not_duplicate"), Choice("Yes", "1", "equivalent", "duplicate"))
    private const val TWO_SENTENCES = "\nSentence 1: {sentence1}\nSentence 2: {sentence2}\n"

    private fun classes(
        name: String,
        columns: Map<String, List<String>>,
        choices: List<Choice>,
        prompt: String,
        labels: List<String> = listOf("label"),
        clean: (Map<String, String>) -> Map<String, String> = { it },
    ) = Task(name, Format.CLASSIFICATION, columns, choices, prompt, labels, clean)

    private fun same(vararg names: String) = names.associateWith { listOf(it) }

    val ALL: Map<String, Task> = listOf(
        classes(
            "sst2", mapOf("text" to listOf("sentence", "text")),
            listOf(Choice(" terrible", "0", "negative"), Choice(" great", "1", "positive")), "{text} It was",
        ),
        classes(
            "rte", mapOf("premise" to listOf("sentence1", "premise"), "hypothesis" to listOf("sentence2", "hypothesis")), ENTAILS,
            "{premise}\nDoes this mean that \"{hypothesis}\" is true? Yes or No?\n",
        ),
        classes(
            "mrpc", mapOf("sentence1" to listOf("sentence1", "#1 String"), "sentence2" to listOf("sentence2", "#2 String")), SAME,
            "Do the following two sentences mean the same thing? Yes or No?$TWO_SENTENCES", listOf("label", "Quality"),
        ),
        classes(
            "qqp", same("question1", "question2"), SAME,
            "Are these two questions asking the same thing? Yes or No?\nQuestion 1: {question1}\nQuestion 2: {question2}\n",
            listOf("label", "is_duplicate"),
        ),
        classes(
            "qnli", mapOf("sentence1" to listOf("question"), "sentence2" to listOf("sentence")), ENTAILS,
            "Does this sentence answer the question? Yes or No?$TWO_SENTENCES",
        ),
        classes(
            "wnli", same("sentence1", "sentence2"),
            listOf(Choice("No", "0", "not_entailment"), Choice("Yes", "1", "entailment")),
            "Given the first sentence, is the second sentence true? Yes or No?$TWO_SENTENCES",
        ),
        classes(
            "boolq", same("passage", "question"), NO_YES, "{passage} {question}?\n", listOf("label", "answer"),
            { values ->
                val question = values.getValue("question").removeSuffix("?")
                values + ("question" to upperFirst(question))
            },
        ),
        classes(
            "wsc",
            mapOf(
                "text" to listOf("text"), "pronoun" to listOf("span2_text", "target.span2_text"),
                "noun" to listOf("span1_text", "target.span1_text"),
            ),
            NO_YES, "{text}\nIn the previous sentence, does the pronoun \"{pronoun}\" refer to {noun}? Yes or No?\n",
            clean = { values -> values + ("pronoun" to values.getValue("pronoun").lowercase()) },
        ),
        classes(
            "wic", same("word", "sentence1", "sentence2"), NO_YES,
            "Does the word \"{word}\" have the same meaning in these two sentences? Yes, No?\n{sentence1}\n{sentence2}\n",
        ),
        classes(
            "multirc",
            mapOf("paragraph" to listOf("passage", "paragraph"), "question" to listOf("question"), "answer" to listOf("answer")), NO_YES,
            "{paragraph}\nQuestion: {question}\nI found this answer \"{answer}\". Is that correct? Yes or No?\n",
        ),
        Task(
            "copa", Format.MULTIPLE_CHOICE, same("premise", "choice1", "choice2", "question"),
            listOf(Choice("", "0", "choice1"), Choice("", "1", "choice2")), "", pairs = ::copa,
        ),
        Task(
            "winogrande", Format.MULTIPLE_CHOICE, same("sentence", "option1", "option2"),
            listOf(Choice("", "1", "option1"), Choice("", "2", "option2")), "", listOf("label", "answer"), pairs = ::winogrande,
        ),
        Task(
            "squad", Format.QA, same("title", "context", "question"), emptyList(),
            "Title: {title}\nContext: {context}\nQuestion: {question}\nAnswer:", listOf("label", "answers"),
        ),
    ).associateBy { it.name }

    /** The task of that name; case, '-' and '_' do not matter ("SST-2" is sst2). */
    fun find(name: String): Task = ALL[plainName(name)] ?: throw configError(
        "unknown task '$name'", ALL.keys.joinToString(", "), name, "without a task the format is inferred from the keys",
    )

    internal fun plainName(name: String): String = name.lowercase().filter { it in 'a'..'z' || it in '0'..'9' }

    private fun upperFirst(text: String): String {
        if (text.isEmpty()) return text
        val end = text.offsetByCodePoints(0, 1)
        return text.substring(0, end).uppercase() + text.substring(end)
    }

    /** <premise> so/because <candidate>, the candidate in lower case except "I". */
    private fun copa(values: Map<String, String>): List<Pair<String, String>> {
        val word = mapOf("effect" to "so", "cause" to "because")[values.getValue("question").lowercase()]
            ?: throw BadRow("question", "expected 'cause' or 'effect', received ${describe(values["question"])}")
        val prompt = "${values.getValue("premise").removeSuffix(".")} $word"
        return listOf("choice1", "choice2").map { prompt to " " + lowerFirst(values.getValue(it)) }
    }

    private fun lowerFirst(sentence: String): String {
        val first = sentence.substringBefore(' ')
        if (first == "I" || first.startsWith("I'") || first.startsWith("I\u2019")) return sentence
        return first.lowercase() + sentence.substring(first.length)
    }

    /** Each option stands in the context, and the continuation, which both share, is what is scored. */
    private fun winogrande(values: Map<String, String>): List<Pair<String, String>> {
        val sentence = values.getValue("sentence")
        val before = sentence.substringBefore('_')
        val after = sentence.substringAfter('_', "")
        if ('_' !in sentence || '_' in after || Texts.isBlank(after)) throw BadRow("sentence", "expected exactly one '_', with text after it")
        return listOf("option1", "option2").map { before + values.getValue(it) to after }
    }
}
