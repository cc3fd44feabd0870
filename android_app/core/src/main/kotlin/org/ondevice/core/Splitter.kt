package org.ondevice.core

/** One pre-tokenizer: cuts a stretch of text into pieces, all of it kept. */
internal fun interface Splitter {
    fun split(span: Span): List<Span>
}

/** The pre-tokenizers of byte-level models, after `tokenizers`. */
internal object Splitters {
    fun sequence(parts: List<Splitter>) = Splitter { span ->
        parts.fold(listOf(span)) { pieces, part -> pieces.flatMap { part.split(it) } }
    }

    /** `ByteLevel`: maybe a space in front, maybe GPT-2's pattern; the letters are the model's matter. */
    fun byteLevel(addPrefixSpace: Boolean, useRegex: Boolean) = Splitter { span ->
        val text = if (addPrefixSpace && !span.text.startsWith(' ')) span.prepend(' ') else span
        if (useRegex) cut(text, Patterns::gpt2) else listOf(text)
    }

    /** `Digits`: numbers apart, each digit alone if [individual]. */
    fun digits(individual: Boolean) = Splitter { span ->
        cut(span) { text, start ->
            var end = start + Character.charCount(text.codePointAt(start))
            val number = CodePoints.isNumeric(text.codePointAt(start))
            if (!(number && individual)) {
                while (end < text.length && CodePoints.isNumeric(text.codePointAt(end)) == number) {
                    end += Character.charCount(text.codePointAt(end))
                }
            }
            end
        }
    }

    /** `Split` by one of the patterns that are known by name. */
    fun pattern(next: (String, Int) -> Int) = Splitter { span -> cut(span, next) }

    private fun cut(span: Span, next: (String, Int) -> Int): List<Span> {
        val pieces = ArrayList<Span>()
        var start = 0
        while (start < span.text.length) {
            val end = next(span.text, start)
            pieces.add(span.sub(start, end))
            start = end
        }
        return pieces
    }
}

/**
 * The patterns of GPT-2, Llama 3 and Qwen 2, as scanners: each gives the end of the match that begins at `start`.
 *
 * They are not compiled as regular expressions, because Android's engine (ICU), the JVM's and the one behind
 * `tokenizers` (Oniguruma) disagree about `\s`, `\p{L}` and characters newer than themselves.
 */
internal object Patterns {
    const val GPT2 = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
    private const val HEAD = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"
    private const val TAIL = "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
    const val QWEN2 = "$HEAD\\p{N}$TAIL"
    const val LLAMA3 = "$HEAD\\p{N}{1,3}$TAIL"

    private val CONTRACTIONS = listOf("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")

    /** The scanner of a pattern's text, or null when it is none of the known ones. */
    fun of(pattern: String): ((String, Int) -> Int)? = when (pattern) {
        GPT2 -> ::gpt2
        QWEN2 -> { text, start -> modern(text, start, 1) }
        LLAMA3 -> { text, start -> modern(text, start, 3) }
        else -> null
    }

    fun gpt2(text: String, start: Int): Int {
        contraction(text, start, ignoreCase = false)?.let { return it }
        val body = if (text[start] == ' ' && start + 1 < text.length) start + 1 else start
        val point = text.codePointAt(body)
        if (CodePoints.isLetter(point)) return run(text, body) { CodePoints.isLetter(it) }
        if (CodePoints.isNumber(point)) return run(text, body) { CodePoints.isNumber(it) }
        if (CodePoints.isOther(point)) return run(text, body) { CodePoints.isOther(it) }
        return spaces(text, start)
    }

    private fun modern(text: String, start: Int, numbers: Int): Int {
        contraction(text, start, ignoreCase = true)?.let { return it }
        val first = text.codePointAt(start)
        val second = start + Character.charCount(first)
        if (CodePoints.isLetter(first)) return run(text, start) { CodePoints.isLetter(it) }
        val mayLead = first != '\r'.code && first != '\n'.code && !CodePoints.isNumber(first)
        if (mayLead && second < text.length && CodePoints.isLetter(text.codePointAt(second))) {
            return run(text, second) { CodePoints.isLetter(it) }
        }
        if (CodePoints.isNumber(first)) {
            var end = second
            var count = 1
            while (count < numbers && end < text.length && CodePoints.isNumber(text.codePointAt(end))) {
                end += Character.charCount(text.codePointAt(end))
                count++
            }
            return end
        }
        val body = if (first == ' '.code && second < text.length) second else start
        if (CodePoints.isOther(text.codePointAt(body))) {
            var end = run(text, body) { CodePoints.isOther(it) }
            while (end < text.length && (text[end] == '\r' || text[end] == '\n')) end++
            return end
        }
        val end = run(text, start) { CodePoints.isWhiteSpace(it) }
        for (index in end - 1 downTo start) if (text[index] == '\r' || text[index] == '\n') return index + 1
        return spaces(text, start)
    }

    /** `\s+(?!\S)|\s+`: the last space before a word is left to the word. */
    private fun spaces(text: String, start: Int): Int {
        val end = run(text, start) { CodePoints.isWhiteSpace(it) }
        return if (end < text.length && end - start > 1) end - 1 else end
    }

    private fun contraction(text: String, start: Int, ignoreCase: Boolean): Int? {
        if (text[start] != '\'') return null
        for (word in CONTRACTIONS) {
            var index = 1
            while (index < word.length && start + index < text.length) {
                val c = text[start + index]
                if ((if (ignoreCase && c in 'A'..'Z') c + 32 else c) != word[index]) break
                index++
            }
            if (index == word.length) return start + index
        }
        return null
    }

    private inline fun run(text: String, start: Int, belongs: (Int) -> Boolean): Int {
        var end = start
        while (end < text.length) {
            val point = text.codePointAt(end)
            if (!belongs(point)) break
            end += Character.charCount(point)
        }
        return end
    }
}
