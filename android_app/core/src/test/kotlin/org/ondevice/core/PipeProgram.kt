package org.ondevice.core

import java.io.BufferedInputStream
import java.io.BufferedOutputStream
import java.io.DataInputStream
import java.io.File
import java.io.IOException
import java.nio.ByteBuffer
import java.nio.ByteOrder

/**
 * The real program, run by the ExecuTorch runtime of a Python process (`tests/android/program_server.py`). Frozen weights
 * do not go through the pipe: that process maps the same file and is told which rows.
 *
 * @param file of the artifact that is run in place of its training program.
 */
class PipeProgram(artifact: File, python: String, root: File, file: String? = null) : Program {
    private val errors = File.createTempFile("program-server", ".log").also { it.deleteOnExit() }
    private val process = ProcessBuilder(listOfNotNull(python, File(root, "tests/android/program_server.py").path, artifact.path, file))
        .directory(root)
        .redirectError(errors)
        .apply { environment()["PYTHONPATH"] = root.path }
        .start()
    private val out = BufferedOutputStream(process.outputStream, 1 shl 16)
    private val input = DataInputStream(BufferedInputStream(process.inputStream, 1 shl 16))

    /** Names of the methods that were run. */
    val calls = LinkedHashSet<String>()
    var unloads = 0
        private set

    override fun execute(method: String, inputs: List<Tensor>, layer: Int): List<Tensor> {
        calls.add(method)
        try {
            return ask(method, inputs, layer)
        } catch (error: IOException) {
            throw AssertionError("the program's process has gone: ${errors.readText().takeLast(2000)}", error)
        }
    }

    private fun ask(method: String, inputs: List<Tensor>, layer: Int): List<Tensor> {
        val name = method.toByteArray()
        out.write(little(12 + name.size) { putInt(name.size).put(name).putInt(layer).putInt(inputs.size) })
        for (tensor in inputs) {
            tensor.mapped?.let { rows ->
                val text = rows.name.toByteArray()
                out.write(little(13 + text.size + 4 * tensor.shape.size) {
                    put(2).putInt(tensor.shape.size)
                    tensor.shape.forEach { putInt(it.toInt()) }
                    putInt(text.size).put(text).putInt(rows.firstRow)
                })
            } ?: out.write(little(5 + 4 * tensor.shape.size + tensor.count * tensor.dtype.bytes) {
                put(if (tensor.dtype == DType.INT64) 0 else 1).putInt(tensor.shape.size)
                tensor.shape.forEach { putInt(it.toInt()) }
                if (tensor.dtype == DType.INT64) tensor.longs().forEach { putLong(it) } else tensor.floats().forEach { putFloat(it) }
            })
        }
        out.flush()
        if (input.readUnsignedByte() == 1) {
            val message = ByteArray(int()).also(input::readFully)
            throw OndeviceException(ErrorKind.ARTIFACT, "the program's $method failed", received = String(message))
        }
        return List(int()) { tensor() }
    }

    override fun unload() {
        unloads++
    }

    override fun close() {
        out.close()
        process.waitFor()
    }

    private fun tensor(): Tensor {
        val float = input.readUnsignedByte() == 1
        val shape = LongArray(int()) { int().toLong() }
        val count = shape.fold(1L) { product, size -> product * size }.toInt()
        val buffer = ByteBuffer.wrap(ByteArray(count * if (float) 4 else 8).also(input::readFully)).order(ByteOrder.LITTLE_ENDIAN)
        return if (float) Tensor.of(FloatArray(count) { buffer.float }, *shape) else Tensor.of(LongArray(count) { buffer.long }, *shape)
    }

    private fun int(): Int = Integer.reverseBytes(input.readInt())

    private fun little(size: Int, fill: ByteBuffer.() -> Unit): ByteArray =
        ByteBuffer.allocate(size).order(ByteOrder.LITTLE_ENDIAN).apply(fill).array()
}

/** Resident memory of this process, from the kernel. */
object ProcessMeter : Meter {
    override fun peakMemoryBytes(): Long = kilobytes("VmHWM") * 1024

    override fun memoryBytes(): Long = kilobytes("VmRSS") * 1024

    private fun kilobytes(name: String): Long =
        File("/proc/self/status").readLines().first { it.startsWith(name) }.filter { it.isDigit() }.toLong()
}
