package org.ondevice.core

import com.google.gson.Strictness
import com.google.gson.stream.JsonReader
import com.google.gson.stream.JsonToken
import com.google.gson.stream.JsonWriter
import java.io.IOException
import java.io.StringReader
import java.io.StringWriter
import java.math.BigInteger

/** A text that is not JSON, or that says one key twice; [key] is that key, else empty. */
class JsonException(val key: String, message: String) : Exception(message)

/**
 * Strict JSON (RFC 8259) to and from plain values: null, Boolean, Long, BigInteger, Double, String, List, Map.
 *
 * Gson's reader does the parsing in its strict mode; a key that occurs twice, and nesting deeper than
 * [MAX_DEPTH], are errors here, for either would be read differently elsewhere.
 */
object Json {
    private const val MAX_DEPTH = 512

    /** @throws JsonException what is wrong and where. */
    fun parse(text: String): Any? {
        val reader = JsonReader(StringReader(text))
        reader.strictness = Strictness.STRICT
        try {
            val value = read(reader, 0)
            if (reader.peek() != JsonToken.END_DOCUMENT) throw JsonException("", "there is more after the value")
            return value
        } catch (error: IOException) {
            throw JsonException("", reason(error))
        } catch (error: IllegalStateException) {
            throw JsonException("", reason(error))
        } catch (error: NumberFormatException) {
            throw JsonException("", reason(error))
        }
    }

    /** Compact unless [indent] is given; NaN and infinities become the texts `nan`, `inf` and `-inf`. */
    fun write(value: Any?, indent: String = ""): String {
        val text = StringWriter()
        val writer = JsonWriter(text)
        writer.isHtmlSafe = false
        writer.serializeNulls = true
        if (indent.isNotEmpty()) writer.setIndent(indent)
        write(writer, value)
        writer.flush()
        return text.toString()
    }

    private fun read(reader: JsonReader, depth: Int): Any? {
        if (depth > MAX_DEPTH) throw JsonException("", "is nested too deeply")
        return when (reader.peek()) {
            JsonToken.BEGIN_OBJECT -> readObject(reader, depth)
            JsonToken.BEGIN_ARRAY -> {
                val list = ArrayList<Any?>()
                reader.beginArray()
                while (reader.hasNext()) list.add(read(reader, depth + 1))
                reader.endArray()
                list
            }
            JsonToken.STRING -> reader.nextString()
            JsonToken.NUMBER -> number(reader.nextString())
            JsonToken.BOOLEAN -> reader.nextBoolean()
            else -> {
                reader.nextNull()
                null
            }
        }
    }

    private fun readObject(reader: JsonReader, depth: Int): Map<String, Any?> {
        val map = LinkedHashMap<String, Any?>()
        reader.beginObject()
        while (reader.hasNext()) {
            val key = reader.nextName()
            if (map.containsKey(key)) throw JsonException(key, "the key occurs twice")
            map[key] = read(reader, depth + 1)
        }
        reader.endObject()
        return map
    }

    private fun number(text: String): Any {
        if (text.any { it == '.' || it == 'e' || it == 'E' }) return text.toDouble()
        return text.toLongOrNull() ?: BigInteger(text)
    }

    private fun write(writer: JsonWriter, value: Any?) {
        when (value) {
            null -> writer.nullValue()
            is Boolean -> writer.value(value)
            is Double -> if (value.isFinite()) writer.value(value) else writer.value(special(value))
            is Float -> write(writer, value.toDouble())
            is Number -> writer.value(value)
            is Map<*, *> -> {
                writer.beginObject()
                for ((key, item) in value) {
                    writer.name(key.toString())
                    write(writer, item)
                }
                writer.endObject()
            }
            is Iterable<*> -> {
                writer.beginArray()
                for (item in value) write(writer, item)
                writer.endArray()
            }
            is FloatArray -> write(writer, value.asList())
            is DoubleArray -> write(writer, value.asList())
            else -> writer.value(value.toString())
        }
    }

    private fun special(value: Double): String = if (value.isNaN()) "nan" else if (value > 0) "inf" else "-inf"

    private fun reason(error: Exception): String =
        (error.message ?: error.javaClass.simpleName).lineSequence().first()
            .replace("Use JsonReader.setStrictness(Strictness.LENIENT) to accept malformed JSON", "malformed").removeSuffix(" path $")
}

/** A value as Json reads it, described for messages as `ondevice/data/rows.py` does. */
internal fun describe(value: Any?): String = when (value) {
    null -> "null"
    is String -> "'" + (if (value.length <= 40) value else value.take(37) + "...") + "'"
    is Boolean -> "a boolean $value"
    is BigInteger -> "a number"
    is Number -> "a number $value"
    is List<*> -> "a list"
    is Map<*, *> -> "an object"
    else -> value.javaClass.simpleName
}
