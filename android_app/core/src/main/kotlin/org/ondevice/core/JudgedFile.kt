package org.ondevice.core

import java.io.File

/** An answer of the model that the user judged: [liked] is thumbs up. */
data class JudgedAnswer(val prompt: String, val answer: String, val liked: Boolean)

/**
 * Answers that the user judged, one JSON object a line with `prompt`, `answer` and `liked`: the ground for learning from
 * feedback. Every change replaces the whole file at once.
 */
class JudgedFile(val file: File) {
    /**
     * In the order in which they were judged; none if there is no file yet.
     *
     * @throws OndeviceException [ErrorKind.DATA]: a line is no judged answer; it is named.
     */
    fun read(): List<JudgedAnswer> {
        if (!file.isFile) return emptyList()
        return file.readText().lines().withIndex().filter { it.value.isNotBlank() }.map { (index, line) ->
            val values = try {
                Json.parse(line) as? Map<*, *>
            } catch (_: JsonException) {
                null
            }
            val (prompt, answer, liked) = listOf("prompt", "answer", "liked").map { values?.get(it) }
            if (prompt !is String || answer !is String || liked !is Boolean) {
                throw dataError(
                    "${file.name}:${index + 1} is no judged answer", "an object with prompt, answer and liked", line.take(80),
                    "delete the file of judged answers",
                )
            }
            JudgedAnswer(prompt, answer, liked)
        }
    }

    /** Keep a judgement; one of the same prompt and answer is replaced. */
    fun put(judged: JudgedAnswer) = write(read().filter { it.prompt != judged.prompt || it.answer != judged.answer } + judged)

    /** How an answer was judged; null if it was not. */
    fun of(prompt: String, answer: String): Boolean? = read().lastOrNull { it.prompt == prompt && it.answer == answer }?.liked

    /** Forget the one at [index], counted from 0. */
    fun delete(index: Int) {
        val all = read()
        if (index !in all.indices) throw dataError("no such answer", "0 to ${all.size - 1}", index)
        write(all.filterIndexed { at, _ -> at != index })
    }

    private fun write(all: List<JudgedAnswer>) {
        val lines = all.joinToString("") { Json.write(linkedMapOf("prompt" to it.prompt, "answer" to it.answer, "liked" to it.liked)) + "\n" }
        Storage.atomicWrite(file, lines)
    }
}
