package org.ondevice.core

/** Ids with the range of the text (UTF-16 units) that each covers: [starts] inclusive, [ends] exclusive. */
class Encoded(val ids: IntArray, val starts: IntArray, val ends: IntArray)

/**
 * Byte-level BPE from a `tokenizer.json`, with the ids that Python's `tokenizers` gives; see [TokenizerFile].
 *
 * Our own, because no library fits: `ai.djl.huggingface:tokenizers` 0.36.0 carries native code for glibc, macOS and
 * Windows only (none that Android loads), and its Android counterpart `ai.djl.android:tokenizer-native` is not on Maven Central.
 *
 * Letters, digits and white space come from tables ([CodePoints]) that were read out of `tokenizers`, so that the
 * phone's Unicode version does not matter to splitting. Unicode normalisation is the platform's
 * (`java.text.Normalizer`): only characters newer than the phone's Android could differ there.
 * Threads may share one.
 */
class Tokenizer internal constructor(
    private val model: Bpe,
    private val added: AddedTokens,
    private val normalizer: TextNormalizer?,
    private val splitter: Splitter,
    private val prefixIds: IntArray,
    private val suffixIds: IntArray,
    /** Beginning of sequence, as `tokenizer_config.json` names it; null without one. */
    val bosId: Int?,
    val eosId: Int?,
    val eosToken: String?,
    /** What rows are padded with: the pad token, else the end of sequence, else 0. */
    val padId: Int,
    /** The Jinja text of the chat template; null without one. */
    val chatTemplate: String?,
    private val specialIds: Set<Int>,
) {
    /** Highest id plus one. */
    val vocabularySize: Int get() = maxOf(model.size, added.highestId + 1)

    fun idOf(token: String): Int? = added.idOf(token) ?: model.idOf(token)

    /**
     * @param addSpecialTokens put in what the post-processor adds in front and behind.
     * @throws OndeviceException [ErrorKind.DATA] when [text] is not valid Unicode (half a surrogate pair).
     */
    fun encode(text: String, addSpecialTokens: Boolean = false): IntArray {
        val ids = IntList()
        walk(text) { _, found, _ -> for (id in found) ids.add(id) }
        val body = ids.toArray()
        return if (addSpecialTokens) prefixIds + body + suffixIds else body
    }

    /** As [encode] without special tokens, with the range of the text that each id covers. */
    fun encodeWithOffsets(text: String): Encoded {
        val ids = IntList()
        val starts = IntList()
        val ends = IntList()
        walk(text) { span, found, widths ->
            var byte = 0
            val chars = if (widths == null) null else charOfByte(span.text)
            for ((index, id) in found.withIndex()) {
                ids.add(id)
                if (widths == null) {
                    starts.add(span.start(0))
                    ends.add(span.end(span.text.length - 1))
                    continue
                }
                val first = chars!![byte]
                byte += widths[index]
                val last = chars[byte - 1]
                val wide = span.text[last].isHighSurrogate()
                starts.add(span.start(first))
                ends.add(span.end(if (wide) last + 1 else last))
            }
        }
        return Encoded(ids.toArray(), starts.toArray(), ends.toArray())
    }

    /** The text of [ids]; bytes that are no UTF-8 become U+FFFD. Ids outside the vocabulary are left out. */
    fun decode(ids: IntArray, skipSpecialTokens: Boolean = true): String {
        val bytes = ByteList()
        for (id in ids) {
            if (skipSpecialTokens && id in specialIds) continue
            val token = added.contentOf(id) ?: model.tokenOf(id) ?: continue
            ByteLetters.append(token, bytes)
        }
        return Utf8.decodeLossy(bytes.array(), bytes.size)
    }

    /** Every piece of [text] with its ids; widths are null for added tokens. */
    private fun walk(text: String, take: (Span, IntArray, IntArray?) -> Unit) {
        if (Texts.halfPair(text)) throw dataError("the text is not valid Unicode (half a surrogate pair)", hint = "type it again")
        if (text.isEmpty()) return
        for (raw in added.split(Span(text), normalized = false)) {
            if (raw.id != null) {
                take(raw.span, intArrayOf(raw.id), null)
                continue
            }
            val normal = normalizer?.apply(raw.span) ?: raw.span
            for (part in added.split(normal, normalized = true)) {
                if (part.id != null) {
                    take(part.span, intArrayOf(part.id), null)
                } else {
                    for (piece in splitter.split(part.span)) {
                        val word = model.encode(piece.text)
                        take(piece, word.ids, word.widths)
                    }
                }
            }
        }
    }

    /** Index of the UTF-16 unit that each UTF-8 byte belongs to (the first of a surrogate pair). */
    private fun charOfByte(text: String): IntArray {
        val places = IntList()
        var index = 0
        while (index < text.length) {
            val point = text.codePointAt(index)
            repeat(Utf8.width(point)) { places.add(index) }
            index += Character.charCount(point)
        }
        return places.toArray()
    }
}

/** A stretch of normalised text that knows where each of its UTF-16 units came from. */
internal class Span(val text: String, private val starts: IntArray? = null, private val ends: IntArray? = null, private val base: Int = 0) {
    fun start(index: Int): Int = starts?.get(index) ?: (base + index)

    fun end(index: Int): Int = ends?.get(index) ?: (base + index + 1)

    fun sub(from: Int, to: Int): Span {
        if (from == 0 && to == text.length) return this
        if (starts == null) return Span(text.substring(from, to), base = base + from)
        return Span(text.substring(from, to), starts.copyOfRange(from, to), ends!!.copyOfRange(from, to))
    }

    /** With one more character in front, which has the place of the first. */
    fun prepend(c: Char): Span {
        val first = if (text.isEmpty()) base else start(0)
        val newStarts = IntArray(text.length + 1) { if (it == 0) first else start(it - 1) }
        val newEnds = IntArray(text.length + 1) { if (it == 0) first else end(it - 1) }
        return Span(c + text, newStarts, newEnds)
    }
}
