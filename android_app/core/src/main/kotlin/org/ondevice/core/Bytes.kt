package org.ondevice.core

/** GPT-2's alphabet: a printable letter for each byte. */
internal object ByteLetters {
    /** Letter of each byte. */
    val letterOf = CharArray(256)
    private val byteOf = IntArray(512) { -1 }

    init {
        var extra = 0
        for (byte in 0..255) {
            val printable = byte in 33..126 || byte in 161..172 || byte in 174..255
            letterOf[byte] = if (printable) byte.toChar() else (256 + extra++).toChar()
            byteOf[letterOf[byte].code] = byte
        }
    }

    /** The bytes of a token's letters; a token with another letter in it is its own UTF-8 text. */
    fun append(token: String, out: ByteList) {
        if (token.all { it.code < byteOf.size && byteOf[it.code] >= 0 }) {
            for (letter in token) out.add(byteOf[letter.code])
        } else {
            for (byte in token.toByteArray(Charsets.UTF_8)) out.add(byte.toInt())
        }
    }
}

/** UTF-8 as Rust's `from_utf8_lossy` reads it: one U+FFFD for each longest beginning of a character that breaks off. */
internal object Utf8 {
    fun width(codePoint: Int): Int = when {
        codePoint < 0x80 -> 1
        codePoint < 0x800 -> 2
        codePoint < 0x10000 -> 3
        else -> 4
    }

    fun decodeLossy(bytes: ByteArray, size: Int): String {
        val text = StringBuilder(size)
        var index = 0
        while (index < size) {
            val first = bytes[index].toInt() and 0xff
            if (first < 0x80) {
                text.append(first.toChar())
                index++
                continue
            }
            val width = if (first in 0xc2..0xdf) 2 else if (first in 0xe0..0xef) 3 else if (first in 0xf0..0xf4) 4 else 1
            var point = first and (0xff shr (width + 1))
            var good = 1
            while (good < width && index + good < size) {
                val next = bytes[index + good].toInt() and 0xff
                if (next !in (if (good == 1) second(first) else 0x80..0xbf)) break
                point = (point shl 6) or (next and 0x3f)
                good++
            }
            if (width > 1 && good == width) text.appendCodePoint(point) else text.append('\uFFFD')
            index += good
        }
        return text.toString()
    }

    /** Which second bytes may follow a first byte. */
    private fun second(first: Int): IntRange = when (first) {
        0xe0 -> 0xa0..0xbf
        0xed -> 0x80..0x9f
        0xf0 -> 0x90..0xbf
        0xf4 -> 0x80..0x8f
        else -> 0x80..0xbf
    }
}
