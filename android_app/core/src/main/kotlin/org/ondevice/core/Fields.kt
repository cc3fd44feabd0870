package org.ondevice.core

/**
 * A JSON object read field by field; every error names the file and the dotted field.
 *
 * @param file what is read, for messages.
 * @param prefix dotted path of this object inside it, "" at the top.
 */
internal class Fields(private val values: Map<*, *>, private val file: String, private val prefix: String = "") {
    val keys: Set<String> get() = values.keys.map { it.toString() }.toSet()

    fun has(name: String): Boolean = values[name] != null

    fun raw(name: String): Any? = values[name]

    fun text(name: String): String = need(name, "a text") { it as? String }

    fun oneOf(name: String, vararg values: String): String =
        need(name, values.joinToString(" or ")) { value -> (value as? String)?.takeIf { it in values } }

    fun textOrNull(name: String): String? = if (has(name)) text(name) else null

    fun long(name: String): Long = need(name, "an integer") { it as? Long }

    fun longOrNull(name: String): Long? = if (has(name)) long(name) else null

    fun int(name: String, range: IntRange = 0..Int.MAX_VALUE): Int =
        need(name, "an integer from ${range.first} to ${range.last}") { value ->
            (value as? Long)?.takeIf { it in range.first.toLong()..range.last.toLong() }?.toInt()
        }

    fun double(name: String): Double = need(name, "a number") { (it as? Number)?.toDouble()?.takeIf(Double::isFinite) }

    fun flag(name: String, default: Boolean): Boolean =
        if (has(name)) need(name, "true or false") { it as? Boolean } else default

    fun fields(name: String): Fields = Fields(need(name, "an object") { it as? Map<*, *> }, file, path(name))

    fun fieldsOrNull(name: String): Fields? = if (has(name)) fields(name) else null

    fun map(name: String): Map<String, Any?> =
        need(name, "an object") { it as? Map<*, *> }.entries.associate { it.key.toString() to it.value }

    fun list(name: String): List<Any?> = need(name, "a list") { it as? List<*> }

    fun texts(name: String): List<String> = list(name).mapIndexed { index, value ->
        value as? String ?: throw wrong("$name.$index", "a text", value)
    }

    fun ints(name: String, range: IntRange): List<Int> = list(name).mapIndexed { index, value ->
        (value as? Long)?.takeIf { it in range.first.toLong()..range.last.toLong() }?.toInt()
            ?: throw wrong("$name.$index", "an integer from ${range.first} to ${range.last}", value)
    }

    fun objects(name: String): List<Fields> = list(name).mapIndexed { index, value ->
        Fields(value as? Map<*, *> ?: throw wrong("$name.$index", "an object", value), file, path("$name.$index"))
    }

    fun wrong(name: String, expected: String, value: Any?): OndeviceException =
        artifactError("$file: field '${path(name)}'", expected, describe(value), "export or copy it again")

    private fun <T> need(name: String, expected: String, convert: (Any?) -> T?): T {
        if (!values.containsKey(name)) {
            throw artifactError("$file: field '${path(name)}' is missing", expected, hint = "export or copy it again")
        }
        return convert(values[name]) ?: throw wrong(name, expected, values[name])
    }

    private fun path(name: String) = if (prefix.isEmpty()) name else "$prefix.$name"

    companion object {
        /** The object that is the whole of a JSON file's [text]. */
        fun parse(text: String, file: String): Fields {
            val value = try {
                Json.parse(text)
            } catch (error: JsonException) {
                val where = if (error.key.isEmpty()) "" else "'${error.key}': "
                throw artifactError("$file is not readable JSON", received = where + error.message, hint = "copy it again")
            }
            val map = value as? Map<*, *>
                ?: throw artifactError("$file is no JSON object", "an object", describe(value), "copy it again")
            return Fields(map, file)
        }
    }
}
