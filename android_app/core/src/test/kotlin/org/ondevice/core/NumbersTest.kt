package org.ondevice.core

import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Assertions.assertThrows
import org.junit.jupiter.api.Assertions.assertTrue
import org.junit.jupiter.api.Test
import java.io.File

/** Small arithmetic that has to be Python's, and files that have to be whole. */
class NumbersTest {
    @Test
    fun rowsKeptBackAreDrawnByTheSeed() {
        val cases = (Fixtures.json("numbers.json") as Map<*, *>)["held_out"] as List<*>
        for (case in cases.map { it as Map<*, *> }) {
            val rows = (case["rows"] as Long).toInt()
            assertEquals(Fixtures.ints(case["kept"]).toList(), HeldOut.rows(rows, case["seed"] as Long).toList(), "$rows rows")
        }
        val items = List(40) { Item(Example(intArrayOf(it), intArrayOf(it)), line = it) }
        val (train, kept) = HeldOut.split(items, 7)
        assertEquals(4 to 36, kept.size to train.size)
        assertEquals((0 until 40).toSet(), (train + kept).map { it.line }.toSet())
        assertTrue(kept.map { it.line } != (36 until 40).toList())
    }

    @Suppress("UNCHECKED_CAST")
    private fun cases(name: String) = (Fixtures.json("numbers.json") as Map<*, *>)[name] as List<Map<String, Any?>>

    @Test
    fun learningRatesAreThoseOfPython() {
        for (case in cases("rates")) {
            val kind = ScheduleKind.values().first { it.manifestName == case["kind"] }
            val schedule = Schedule(kind, 3e-3, (case["steps"] as Long).toInt(), (case["warmup"] as Long).toInt(), (case["final"] as Number).toDouble())
            for ((step, rate) in (case["rates"] as List<*>).withIndex()) assertEquals((rate as Number).toDouble().toFloat(), schedule.at(step).toFloat(), "$case $step")
        }
        assertThrows(OndeviceException::class.java) { Schedule(ScheduleKind.CONSTANT, 1e-3, 5, 5) }
        assertThrows(OndeviceException::class.java) { Schedule(ScheduleKind.CONSTANT, -1.0, 5) }
    }

    @Test
    fun meansAreThoseOfNumpy() {
        for (case in cases("means")) {
            val values = (case["values"] as List<*>).map { (it as Number).toFloat() }.toFloatArray()
            assertEquals((case["mean"] as Number).toFloat().toRawBits(), Means.mean(values).toRawBits(), "${values.size} values")
        }
    }

    @Test
    fun jsonIsStrict() {
        assertEquals(mapOf("a" to listOf(1L, 2.5, null, true, "é😀")), Json.parse(Json.write(mapOf("a" to listOf(1, 2.5, null, true, "é😀")))))
        for (bad in listOf("", "{", "{'a': 1}", "[1,]", "{\"a\": NaN}", "{\"a\": 1} x", "{\"a\": 1, \"a\": 2}", "[\"\u0001\"]", "01", "TRUE", "[".repeat(2000))) {
            assertThrows(JsonException::class.java, { Json.parse(bad) }, bad)
        }
        assertEquals("""["nan","inf","-inf",0.1]""", Json.write(listOf(Double.NaN, Double.POSITIVE_INFINITY, Double.NEGATIVE_INFINITY, 0.1)))
    }

    @Test
    fun atomicFilesAreWholeOrOld() {
        val folder = File(Fixtures.scratch(), "deep/er")
        val file = File(folder, "ä.txt")
        Storage.atomicWrite(file, "one")
        Storage.atomicWrite(file, "two")
        assertEquals("two", file.readText())
        val target = File(folder, "whole")
        Storage.atomicFolder(target) { File(it, "x").writeText("1") }
        assertThrows(IllegalStateException::class.java) { Storage.atomicFolder(target) { File(it, "x").writeText("2"); error("stop") } }
        assertEquals("1", File(target, "x").readText())
        assertEquals(setOf("ä.txt", "whole"), folder.list()!!.toSet())
        val error = assertThrows(OndeviceException::class.java) { Storage.atomicWrite(File(file, "below a file"), "x") }
        assertTrue(error.kind == ErrorKind.STORAGE && "MiB free" in error.message!!, error.message)
    }

    @Test
    fun namesThatLeaveAFolder() {
        for (bad in listOf("", "/x", "../x", "a/../b", "a//b", "a/.", "..", "a\\b", "a\u0000b")) assertEquals(null, Storage.safeRelative(bad), bad)
        for (good in listOf("x", "a/b c/ü", "..x", "a/...")) assertEquals(good, Storage.safeRelative(good))
    }
}
