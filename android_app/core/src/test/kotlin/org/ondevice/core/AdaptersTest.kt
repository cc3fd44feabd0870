package org.ondevice.core

import org.junit.jupiter.api.Assertions.assertArrayEquals
import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Assertions.assertNull
import org.junit.jupiter.api.Assertions.assertThrows
import org.junit.jupiter.api.Assertions.assertTrue
import org.junit.jupiter.api.Test
import java.io.ByteArrayInputStream
import java.io.ByteArrayOutputStream
import java.io.File
import kotlin.random.Random

class AdaptersTest {
    private val manifest = ManifestReader.read(Fixtures.artifact)

    /** A vector with zeros in the padding between matrices, as the program keeps it. */
    private fun vector(seed: Int): FloatArray {
        val random = Random(seed)
        val flat = FloatArray(manifest.adapterSize)
        for (entry in manifest.adapter) for (place in 0 until entry.count) flat[entry.offset + place] = random.nextFloat() - 0.5f
        return flat
    }

    private fun refused(block: () -> Unit): OndeviceException = assertThrows(OndeviceException::class.java) { block() }

    /** Reads what Python trained, and writes it again: the same vector, tensors, digest and configuration. */
    @Test
    fun pythonsAdapterRoundTrips() {
        val python = File(Fixtures.folder, "run/adapter")
        val flat = PeftAdapter(manifest).read(python)
        val state = Fixtures.folder.resolve("run").listFiles { file -> file.name == "checkpoint-00000012" }!!.single()
        val known = Safetensors.read(File(state, "state.safetensors")).tensors.getValue("adapter").floats!!
        assertArrayEquals(known, flat)
        val folder = Fixtures.scratch()
        PeftAdapter(manifest).write(flat, folder)
        val (ours, theirs) = listOf(folder, python).map { Safetensors.read(File(it, PeftAdapter.WEIGHTS_NAME)) }
        for ((name, tensor) in theirs.tensors) assertArrayEquals(tensor.floats, ours.tensors.getValue(name).floats, name)
        assertEquals(theirs.metadata, ours.metadata)
        assertEquals(File(python, PeftAdapter.CONFIG_NAME).readText(), File(folder, PeftAdapter.CONFIG_NAME).readText())
    }

    /** Python's own reader, and the session that refuses another frozen A, take what the app writes. */
    @Test
    fun pythonLoadsWhatTheAppWrites() {
        val folder = Fixtures.scratch()
        val flat = vector(1)
        PeftAdapter(manifest).write(flat, folder)
        File(folder, "flat").writeText(flat.joinToString(" ") { it.toRawBits().toString() })
        val code = """
            import sys; import numpy as np
            from pathlib import Path
            from ondevice.artifact.adapter import load_adapter
            from ondevice.artifact.manifest import read_manifest
            from ondevice.methods.prge.layout import AdapterLayout, Entry
            manifest = read_manifest(Path(sys.argv[1]))
            entries = tuple(Entry(e.layer, e.target, e.offset, e.rank, e.inputs, e.outputs) for e in manifest.adapter)
            layout = AdapterLayout(entries, manifest.adapter_size, manifest.generator.seed)
            names = {(e.layer, e.target): e.linear for e in manifest.adapter}
            flat = layout.from_adapter(load_adapter(sys.argv[2]), names, manifest.method["alpha"])
            bits = np.array(Path(sys.argv[2], "flat").read_text().split(), dtype=np.int64).astype(np.int32).view(np.float32)
            assert np.array_equal(flat, bits)
        """.trimIndent()
        val process = ProcessBuilder(Fixtures.python, "-c", code, Fixtures.artifact.path, folder.path).directory(Fixtures.root).redirectErrorStream(true).start()
        val words = process.inputStream.readBytes().toString(Charsets.UTF_8)
        assertEquals(0, process.waitFor(), words)
    }

    @Test
    fun generatorHasTheGoldenValues() {
        val cases = (Json.parse(File(Fixtures.root, "runtime_ops/golden.json").readText()) as Map<*, *>)["cases"] as List<*>
        assertTrue(cases.size >= 5)
        for (case in cases) {
            case as Map<*, *>
            fun long(name: String) = (case[name] as Number).toLong()
            val last = Generator.streamKey(long("seed"), long("step"), long("queries") - 1, long("tensor"))
            assertEquals(case["last_key"], java.lang.Long.toHexString(last).padStart(16, '0'))
            assertEquals(case["last_words"], listOf(0L, 1L).map { java.lang.Long.toHexString(Generator.word(last, long("start") + it)).padStart(16, '0') })
            for ((query, row) in (case["normal"] as List<*>).withIndex()) {
                val values = Generator.normal(long("seed"), long("step"), long("tensor"), query.toLong(), long("start"), long("count").toInt())
                for ((value, known) in values.zip(row as List<*>)) assertEquals((known as Number).toDouble(), value.toDouble(), 1e-6)
            }
        }
    }

    @Test
    fun fusedMultiplyAddRoundsOnce() {
        val random = Random(5)
        repeat(200_000) {
            val (a, b) = random.nextFloat() * 4 - 2 to random.nextFloat() * 4 - 2
            val c = (random.nextFloat() - 0.5f) * if (it % 3 == 0) 1e-7f else 2f
            assertEquals(Math.fma(a, b, c).toRawBits(), Float32Math.fma(a, b, c).toRawBits())
        }
        // a sum that float64 cannot tell from the middle between two float32 numbers
        repeat(1000) {
            val c = Float.fromBits(random.nextInt(0x3f000000, 0x40000000) or 1)
            val (a, b) = 1f + 1.1920929E-7f to Math.ulp(c) / 2 * (1f - 1.1920929E-7f)
            for (sign in listOf(1f, -1f)) {
                assertEquals(Math.fma(a, sign * b, c).toRawBits(), Float32Math.fma(a, sign * b, c).toRawBits())
                assertEquals(Math.fma(a, sign * b, -c).toRawBits(), Float32Math.fma(a, sign * b, -c).toRawBits())
            }
        }
    }

    @Test
    fun otherAdaptersAreRefused() {
        val folder = Fixtures.scratch()
        val peft = PeftAdapter(manifest)
        peft.write(vector(2), folder)
        val weights = File(folder, PeftAdapter.WEIGHTS_NAME)
        val config = File(folder, PeftAdapter.CONFIG_NAME)
        val (goodWeights, goodConfig) = weights.readBytes() to config.readText()
        fun after(words: String, change: () -> Unit) {
            weights.writeBytes(goodWeights)
            config.writeText(goodConfig)
            peft.read(folder)
            change()
            refused { peft.read(folder) }.let { assertTrue(words in it.message!!, "$words: ${it.message}") }
        }
        after("torn") { weights.writeBytes(goodWeights.copyOf(goodWeights.size - 8)) }
        after("torn") { weights.writeBytes(ByteArray(4)) }
        after("has changed") { weights.writeBytes(goodWeights.also { it.copyOf() }.copyOf().also { it[it.size - 3] = (it[it.size - 3] + 1).toByte() }) }
        after("lacks a file") { weights.delete() }
        after("not a PEFT adapter") { config.delete() }
        after("rank or scale") { config.writeText(goodConfig.replace("\"lora_alpha\": 16", "\"lora_alpha\": 32")) }
        after("use_dora") { config.writeText(goodConfig.replace("\"use_dora\": false", "\"use_dora\": true")) }
        after("peft_type") { config.writeText(goodConfig.replace("LORA", "IA3")) }
        weights.writeBytes(goodWeights)
        config.writeText(goodConfig)
        val otherSeed = manifest.copy(generator = manifest.generator.copy(seed = 8))
        refused { PeftAdapter(otherSeed).read(folder) }.let { assertTrue("frozen A" in it.message!!) }
        val nan = vector(3).also { it[5] = Float.NaN }
        assertEquals(ErrorKind.TRAINING, refused { peft.write(nan, Fixtures.scratch()) }.kind)
    }

    @Test
    fun listActivateRollBackShareDelete() {
        val root = File(Fixtures.scratch(), "adapters")
        val adapters = Adapters(root, manifest)
        assertEquals(emptyList<AdapterInfo>(), adapters.list())
        assertNull(adapters.activeName())
        assertTrue(adapters.activeVector().all { it == 0f })
        adapters.save("first run", vector(1), mapOf("steps" to 10))
        adapters.save("été 2", vector(2))
        refused { adapters.save("first run", vector(3)) }.let { assertTrue("already" in it.message!!) }
        for (bad in listOf("", "../x", ".hidden", "a/b", "x".repeat(99))) refused { adapters.save(bad, vector(1)) }
        adapters.activate(null)
        adapters.activate("first run")
        adapters.activate("été 2")
        assertArrayEquals(vector(2), adapters.activeVector())
        assertEquals(listOf("été 2"), adapters.list().filter { it.active }.map { it.name })
        assertEquals(10L, adapters.list().first { it.name == "first run" }.note["steps"])
        assertEquals("first run", adapters.rollBack())
        assertNull(adapters.rollBack())
        refused { adapters.rollBack() }
        adapters.activate("first run")
        adapters.activate("été 2")
        adapters.delete("été 2")
        assertEquals("first run", Adapters(root, manifest).activeName())
        val out = ByteArrayOutputStream()
        adapters.zip("first run", out)
        val shared = adapters.importZip(ByteArrayInputStream(out.toByteArray()), "from a friend")
        assertArrayEquals(vector(1), adapters.load(shared.name))
        assertEquals(adapters.sha256("first run"), adapters.sha256("from a friend"))
        refused { adapters.importZip(ByteArrayInputStream(out.toByteArray().copyOf(200)), "cut") }
        File(shared.folder, PeftAdapter.CONFIG_NAME).writeText("{")
        assertTrue(adapters.list().first { it.name == shared.name }.problem != null)
        refused { adapters.activate(shared.name) }
        refused { adapters.delete("nobody") }
        adapters.addFrom(File(Fixtures.folder, "run/adapter"), "from a run")
        assertEquals(setOf("first run", "from a friend", "from a run", "active.json"), root.list()!!.toSet())
    }

    @Test
    fun safetensorsOfOtherTypesAreRead() {
        val code = """
            import sys, torch
            from safetensors.torch import save_file
            x = torch.tensor([[1.5, -2.0, 0.1], [65504.0, 6e-8, float("inf")]])
            save_file({"half": x.half(), "brain": x.bfloat16(), "full": x, "whole": torch.tensor([2**40, -1])}, sys.argv[1])
        """.trimIndent()
        val file = File(Fixtures.scratch(), "x.safetensors")
        assertEquals(0, ProcessBuilder(Fixtures.python, "-c", code, file.path).inheritIO().start().waitFor())
        val tensors = Safetensors.read(file).tensors
        assertArrayEquals(longArrayOf(1L shl 40, -1), tensors.getValue("whole").longs)
        assertArrayEquals(floatArrayOf(1.5f, -2f, 0.1f, 65504f, 6e-8f, Float.POSITIVE_INFINITY), tensors.getValue("full").floats)
        assertArrayEquals(floatArrayOf(1.5f, -2f, 0.099975586f, 65504f, 5.9604645E-8f, Float.POSITIVE_INFINITY), tensors.getValue("half").floats)
        assertEquals(0.100097656f, tensors.getValue("brain").floats!![2])
        assertEquals(listOf(2, 3), tensors.getValue("half").shape)
    }
}
