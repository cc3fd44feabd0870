package org.ondevice.core

import java.io.File

/** One example that was typed in the app. */
data class TypedExample(val prompt: String, val completion: String)

/**
 * Examples typed in the app, in the JSON-lines format that [RowReader] and `ondevice data` read
 * (`{"prompt": ..., "completion": ...}` a line). Every change replaces the whole file at once.
 */
class ExampleFile(val file: File) {
    /** The examples in their order; none if there is no file yet. */
    fun read(): List<TypedExample> {
        if (!file.isFile || file.length() == 0L) return emptyList()
        val rows = RowReader.read(file)
        val problem = rows.problems.firstOrNull()
        if (problem != null || rows.format != Format.COMPLETION) {
            throw dataError(
                "${file.name} was not written by the app", "one prompt and completion a line",
                problem?.toString() ?: rows.format.formatName, "import it as a data file instead",
            )
        }
        return rows.items.map { TypedExample(it.pairs[0].first, it.pairs[0].second) }
    }

    fun add(example: TypedExample) = write(read() + checked(example))

    /** Replace the example at [index], counted from 0. */
    fun replace(index: Int, example: TypedExample) =
        write(read().toMutableList().also { at(it, index)[index] = checked(example) })

    fun delete(index: Int) = write(read().toMutableList().also { at(it, index).removeAt(index) })

    private fun at(examples: MutableList<TypedExample>, index: Int): MutableList<TypedExample> {
        if (index !in examples.indices) throw dataError("no such example", "0 to ${examples.size - 1}", index)
        return examples
    }

    private fun checked(example: TypedExample): TypedExample {
        try {
            Texts.check(example.prompt, "prompt", empty = true)
            Texts.check(example.completion, "completion")
        } catch (bad: BadRow) {
            throw dataError("'${bad.field}' ${bad.reason}", hint = "write what the model should answer")
        }
        return example
    }

    private fun write(examples: List<TypedExample>) {
        val lines = examples.joinToString("") { Json.write(linkedMapOf("prompt" to it.prompt, "completion" to it.completion)) + "\n" }
        Storage.atomicWrite(file, lines)
    }
}
